"""Device memory of a rank, with PyTorch's caching allocator emulated."""
