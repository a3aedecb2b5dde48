"""The real world of a surviving job: supervisor, node agents, trainers and the group that can be cut."""
