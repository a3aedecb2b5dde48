"""Multicast between racks over passive splitters, relayed hop by hop (Shufflecast).

``policy`` says who relays what, which multicasts go at once, and whom a rack asks for what it lacks; ``twin``
emulates that in both engines beside an electrical network, ``plan`` puts the two together for the verb;
``live`` makes racks of processes, network namespaces and tc, and sends files through them.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
