"""The engine's policies in vLLM: ``vllm serve … --scheduler-cls windtunnel.serving.vllm.Scheduler``."""

import lazy_loader

# vLLM is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
