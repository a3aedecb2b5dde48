"""Real processes: a device that has the ownership table, a broker that is bound to it, users that claim
it."""
