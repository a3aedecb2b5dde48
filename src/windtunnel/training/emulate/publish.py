"""Writes what a run found into its folder, and the run into the store."""

from __future__ import annotations

import json
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cluster.model import Cluster
from windtunnel.store.runs import Store
from windtunnel.training.emulate.live.session import Script
from windtunnel.training.emulate.pictures import write_pictures
from windtunnel.training.emulate.run import Capture, Options, Progress, fly, no_progress
from windtunnel.training.emulate.summary import summarise

CAPABILITY = "training.emulate"


def emulate_and_store(
    script: Script,
    cluster: Cluster,
    options: Options,
    *,
    progress: Progress = no_progress,
    store: Store | None = None,
    pictures: bool = True,
    timeline_ranks: tuple[int, ...] = (),
    take: Capture | None = None,
) -> dict[str, Any]:
    """Emulate, keep the run in the store with its files, and return the summary.

    ``pictures``: write report.html, the timeline and the graph besides summary.json. A run that fails is kept
    as failed, with the reason. ``take``: as in `fly`.

    Raises:
        UserError, ScriptError: as `fly`.
    """
    script.check()
    store = store or Store.open()
    inputs = {
        "script": str(script.path),
        "args": list(script.arguments),
        "cluster": cluster.name,
        "world_size": cluster.world_size,
        "ranks": options.ranks,
        "slow": list(options.slow),
        "jitter": options.jitter,
        "allocator": options.allocator,
    }
    run = store.begin(CAPABILITY, inputs, options.seed)
    try:
        outcome = fly(script, cluster, options, progress, take)
        progress("write the report", 0.0)
        summary = summarise(outcome, run.id)
        summary["directory"] = str(run.directory)
        if pictures:
            write_pictures(run.directory, outcome, summary, timeline_ranks)
        text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
        atomic.replace(run.directory / "summary.json", text)
    except (UserError, ScriptError) as error:
        run.fail(str(error))
        raise
    except BaseException as error:
        run.fail(f"{type(error).__name__}: {error}")
        raise
    run.finish(summary)
    return summary
