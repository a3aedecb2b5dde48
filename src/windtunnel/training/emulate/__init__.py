"""Training scripts on clusters that are not there: PyTorch runs, the device does not (PrismLLM).

import windtunnel as wt

run = wt.emulate("train.py", cluster="h100-sxm:16x8", slow=[wt.Slow(host=3, factor=1.3)])
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
