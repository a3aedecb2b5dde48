"""Embedding tables larger than fast memory: which rows lie where, on which device (RecShard, FlexShard)."""
