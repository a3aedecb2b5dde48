"""What arrives from outside over time: failures of machines, sessions of agents."""
