"""A prefix cache for attention and hybrid models: what is kept, where states are copied, what goes first."""
