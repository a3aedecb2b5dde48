"""Verifier, host and device as processes, of which the host is the attacker."""
