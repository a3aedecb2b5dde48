"""Learning at the edge: on devices that keep their data."""
