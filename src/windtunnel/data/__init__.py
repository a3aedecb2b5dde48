"""What feeds training: embedding tables and where their rows lie, samples and how they arrive."""
