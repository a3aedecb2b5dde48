"""Ingestion live: a master, workers and clients as processes, or a reader within the training process."""
