"""Agents: what runs under an agent's hands, and how to keep it."""
