"""Which ranks must be captured so that all are known, and how their slices make one world."""
