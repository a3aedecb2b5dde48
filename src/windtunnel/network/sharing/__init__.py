"""Bandwidth shares on a queue that is not theirs (Augmented Queue, SIGCOMM 2023).

One physical FIFO, and for each entity that shares it two words: how far its arrivals run ahead of its rate.
That is its gap, and what drops, marks or delays its packets; how many flows, which congestion control or how
much UDP an entity sends makes no difference to the others. ``policy`` has the gap and the rates, ``twin`` the
same function before a link of the packet engine, ``live`` the same arithmetic as a program of the kernel.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
