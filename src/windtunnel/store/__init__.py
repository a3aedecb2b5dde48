"""Every run, in a database: SQLite by default, Postgres by URL."""

from windtunnel.base.paths import home
from windtunnel.store.runs import Run, Store

__all__ = ["Run", "Store", "home"]
