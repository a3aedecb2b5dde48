"""Files that outlive their host (LineFS, Kim et al., SOSP 2021): a log, and the rest beside."""

import lazy_loader

# What has a heavy world (sockets, a compressor) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
