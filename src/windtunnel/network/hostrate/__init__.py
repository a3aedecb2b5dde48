"""Windows that a host gives to its senders, so that its own queue stays short (CERA, CLUSTER 2016).

Congestion controls that go by losses fill the queue of the host that they leave, whoever else waits there.
Here a controller reads that queue every few milliseconds; when it grows too long, the window that the line
needs is shared out among containers or users, and each flow gets its part. ``policy`` has the windows,
``twin`` senders of the packet engine under them, ``live`` CUBIC of this kernel under a cap from a map.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
