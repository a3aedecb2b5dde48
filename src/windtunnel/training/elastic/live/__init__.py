"""The real world of a surviving job: supervisor, agents, trainers and the group that can be cut."""
