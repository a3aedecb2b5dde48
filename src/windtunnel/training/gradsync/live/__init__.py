"""Gradients synchronised for real: codecs, sparse sums, and the hook that executes a plan."""
