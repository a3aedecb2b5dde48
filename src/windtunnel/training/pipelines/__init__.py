"""Pipeline templates (Oobleck, Jang et al., SOSP 2023): a pipeline-parallel job that goes on without spares.

A few plans of how to cut the model over so and so many hosts are made before the job starts. Any number of
hosts that is left is a sum of such plans; lost layers are copied from a pipeline that has them.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
