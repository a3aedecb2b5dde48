"""The agent: starts and watches the trainers of one host, and outlives them.

`config` is what it is told at its start, `link` its connection to the supervisor, `door` the socket of its
workers, `workers` the workers as processes, `output` what they print, `agent` the decisions between them.
"""
