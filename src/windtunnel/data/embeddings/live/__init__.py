"""Embedding tables in PyTorch whose rows lie in fast and in slow memory, trained as if they lay in one."""
