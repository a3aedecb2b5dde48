"""The real world of checkpoints: slots in memory, the memory service, storage, and the trainer's side."""
