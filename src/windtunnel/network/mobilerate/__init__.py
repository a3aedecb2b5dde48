"""How fast to send over a mobile link, whose rate swings (SIRA and SIRA-H, IWQoS 2016).

Deep buffers take seconds of queue from who sends too fast; who is careful loses half of the rate. ``policy``
decides the pace from the acknowledgements, ``twin`` holds it against congestion controls on emulated links,
``live`` has the link for real programs, and datagrams over UDP under the same policy.
"""

import lazy_loader

# What is compiled, or speaks to the kernel, is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
