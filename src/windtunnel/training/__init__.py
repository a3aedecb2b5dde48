"""Training: what large jobs do and what they cost."""
