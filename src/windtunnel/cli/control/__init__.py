"""``windtunnel control``: a cluster's state in a database, and agents that learn on a host."""

from windtunnel.cli import new_group

_VERBS = ("init", "serve", "worker", "submit", "ps", "sql", "demo")
group = new_group(
    "A cluster's state in a database: tasks, workers, messages, files; and agents on its hosts.",
    {**{verb: f"control.database:{verb}" for verb in _VERBS}, "node": "control.node"},
)
