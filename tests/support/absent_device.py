"""For `preloaded`: what the worker of a capture loads and imports before its first request."""

from windtunnel.training.emulate.live import native_library, worker

_loaded = native_library.load()
native_library.load = lambda: _loaded  # a process loads it once, before torch
worker._import_torch()
