"""Model variants: a request says what it needs, not which model (INFaaS, ATC 2021)."""
