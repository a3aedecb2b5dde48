"""A cluster's state as tables, its services as transactions: tasks, workers, messages, files (DBOS).

from windtunnel.control.database import open_control
"""

import lazy_loader

# What has a heavy world (SQLAlchemy, fsspec) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
