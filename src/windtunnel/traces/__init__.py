"""What arrives from outside over time: failures of hosts, sessions of agents."""
