"""Ingestion: workers read, transform and batch samples beside trainers (DPP, Zhao et al., ISCA 2022).

from windtunnel.data.ingest import IngestDataset
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
