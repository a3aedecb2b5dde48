"""Two jobs that share a host, run between namespaces."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.linux import network
from windtunnel.network.dag.live import run
from windtunnel.network.dag.policy import GraphJob, GraphTask
from windtunnel.store import eventlog


def recorded(folder: Path) -> Path:
    """The log of a run, by least slack; or a skip by name."""
    line = 12.5e6
    to = {end: (("a.out", 1.0), (f"{end}.in", 1.0)) for end in "bc"}
    job = GraphJob(
        "job",
        (
            GraphTask("first", "compute", 0.1, (("a", 1.0),)),
            # The one that may wait is so large that what the other leaves of the line does not end it first.
            GraphTask("other way", "network", 0.3 * line, to["b"], ("first",)),
            GraphTask("long", "network", 0.1 * line, to["c"], ("first",)),
            GraphTask("last", "compute", 1.0, (("c", 1.0),), ("long",)),
        ),
    )
    other = GraphJob("other", (GraphTask("only", "compute", 0.02, (("a", 1.0),)),), begins=0.03)
    resources = {"a": 1.0, "c": 1.0, "a.out": line, "b.in": line, "c.in": line}
    log = eventlog.EventLog(folder / eventlog.NAME)
    try:
        run(
            [job, other], resources, "mxdag", decided=partial(log.decision, "network.dag", "mxdag"),
            did=lambda what: log.append("effect", **to_plain(what)),
        )  # fmt: skip
    except UserError as error:
        assert "cannot be had here" in str(error) or network.missing(), error
        pytest.skip(str(error))
    finally:
        log.close()
    return log.path
