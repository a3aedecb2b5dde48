"""Training that survives: what checkpoints in peer memory and pipeline templates stand on.

A supervisor without torch owns the membership of a job in numbered generations; a node agent on every machine
outlives the trainers; the trainers' process group can be cut while blocked and rebuilt in the same process.
A training program calls `run`, with a function that is called again, in the same process, after each failure.
"""
