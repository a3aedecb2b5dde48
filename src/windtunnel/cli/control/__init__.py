"""``windtunnel control``: a cluster's state in a database, and agents that learn on a host."""

from windtunnel.cli import new_group

_VERBS = ("init", "serve", "worker", "submit", "ps", "sql", "demo")
group = new_group(
    "Keep a cluster's tasks, messages and files in a database (DBOS), and run agents on hosts (SOL).",
    {**{verb: f"control.database:{verb}" for verb in _VERBS}, "node": "control.node"},
)
