"""Continuous batching around Transformers' own model code, live and emulated by one scheduler."""
