"""Checkpoints in the memory of peers (GEMINI, Wang et al., SOSP 2023).

Every step each rank's state goes to a slot in its own machine's memory, and from there, agent to agent, into
the memory of other machines. A failed job goes on from the newest step of which every shard has a verified
copy.
"""
