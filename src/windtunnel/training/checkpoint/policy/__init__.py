"""The decisions about checkpoints, pure: where copies lie, when a slot may be reused, what is restored."""
