"""The agent: starts and watches the trainers of one host, and outlives them.

`config` is what it is told at its start, `link` its connections, `workers` the trainers as processes and what
they print, `agent` the decisions between them.
"""
