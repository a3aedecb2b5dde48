"""Serving: an engine around Transformers' own models, its policies, and model variants."""
