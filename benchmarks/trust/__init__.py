"""Trusted execution: what it holds off, and what it costs."""
