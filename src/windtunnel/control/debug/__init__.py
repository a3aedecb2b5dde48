"""Past requests of a service, recorded always, replayed and tried with changed code (TROD).

from windtunnel.control.debug import Recorder, replay, retro
"""

import lazy_loader

# What needs a database is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
