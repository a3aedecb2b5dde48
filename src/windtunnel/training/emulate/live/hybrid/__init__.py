"""The process of a live rank: the user's program as it is, in a world of which the other ranks are virtual.

`rank` starts it, `group` is the process group that it gets, `link` its clock and its line to the coordinator
(`windtunnel.training.emulate.hybrid`).
"""
