"""Embedding tables larger than fast memory: which rows lie where, on which device (RecShard, FlexShard).

from windtunnel.data.embeddings import ShardedEmbedding, TieredEmbeddingBag
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
