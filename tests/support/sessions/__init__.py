"""Sessions of agents that are drawn from a seed, with the true class of each turn."""
