"""Branches of requests that are decoded side by side, as far as nobody is harmed (TAPER-style)."""
