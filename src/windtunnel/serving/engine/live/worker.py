"""The engine in a process of its own, on one end of a socket: frames of `base.wire` in both directions.

In: ``settings`` first, then jobs (``add``), ``cancel``, ``end`` of a unit, ``stop``. Out: what the model is
like (``ready``) or why it cannot be served (``wrong``), then who takes part in a step from now on
(``admitted``), before it is computed, and a report of each step. When the socket closes, the other end is
gone, and so is this process.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from windtunnel.base import wire
from windtunnel.base.errors import WindtunnelError
from windtunnel.serving.engine.notes import event_notes

if TYPE_CHECKING:  # PyTorch and the libraries around it are imported when they have been silenced
    from windtunnel.serving.engine.live.loop import Admitted, Engine

SPAN, IDLE = 0.3, 90.0
"""Seconds for which cores are watched, and the percentage of these in which an idle one does nothing."""
FACTS_EVERY = 0.25
"""Seconds between facts, while there are steps."""


def main(number: int) -> None:
    """Serve whoever holds the other end of the socket of this number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the front says when to stop
    logging.disable(logging.WARNING)  # of kernels that are not there, and the like; errors are raised
    warnings.simplefilter("ignore")
    from windtunnel.serving.engine.live.loop import Job

    sock = socket.socket(fileno=number)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    settings, _ = wire.receive(sock)
    threading.Thread(target=_read, args=(sock, inbox), daemon=True).start()
    try:
        engine, about = _engine(settings, lambda those: wire.send(sock, {"admitted": those}))
    except WindtunnelError as error:
        wire.send(sock, {"wrong": str(error)})
        return
    except Exception as error:  # of the model's own code or files: another worker would come no further
        what = f"{settings['model']} cannot be served: {type(error).__name__}: {error}"
        wire.send(sock, {"wrong": " ".join(what.split())})
        return
    wire.send(sock, {"ready": about})
    facts_at = 0.0
    while True:
        while not inbox.empty() or not engine.busy:
            message = inbox.get()
            match message["do"]:
                case "add":
                    engine.add(Job.of(message["job"]))
                case "cancel":
                    engine.cancel(message["id"])
                case "end":
                    engine.end((message["id"], message["unit"]))
                case "stop":
                    return
            if not engine.busy:
                wire.send(sock, {"facts": engine.facts()})
        try:
            report = engine.step()
        except WindtunnelError as error:  # of a user's policy: another worker would come no further
            print(error.details, file=sys.stderr, flush=True)
            wire.send(sock, {"wrong": str(error)})
            return
        if report is None:
            continue
        out: dict[str, Any] = {name: getattr(report, name) for name in report.__slots__}
        out["tokens"] = [(number, unit, *sampled.plain()) for number, unit, sampled in report.tokens]
        if engine.clock() - facts_at > FACTS_EVERY or not engine.busy:
            out["facts"], facts_at = engine.facts(), engine.clock()
        wire.send(sock, out)


def _read(sock: socket.socket, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            inbox.put(wire.receive(sock)[0])
    except (OSError, wire.WireError):
        os._exit(0)


def _engine(settings: dict[str, Any], admitted: Admitted) -> tuple[Engine, dict[str, Any]]:
    """The engine by the settings, and what the front must know of it."""
    import torch

    from windtunnel.serving.engine import own
    from windtunnel.serving.engine.live.families import load
    from windtunnel.serving.engine.live.loop import Engine
    from windtunnel.serving.engine.live.prefixes import Prefixes
    from windtunnel.serving.engine.live.timing import step_time
    from windtunnel.store.eventlog import EventLog

    threads, why = settings["threads"], ""
    if not threads:
        idle, cores = idle_cores()
        threads = max(1, min(torch.get_num_threads(), idle))
        why = f" ({idle} of {cores} cores were idle)"
    torch.set_num_threads(threads)
    dtype = None if settings["dtype"] == "auto" else getattr(torch, settings["dtype"])
    executor = load(settings["model"], settings["device"], settings["seed"], dtype)
    named, policies = own.chosen(settings["branching"], settings["admission"])
    engine: Engine | None = None
    log = note = None
    if settings["every"]:
        events = EventLog(Path(settings["events"]))
        log, note = event_notes(events, settings["every"], lambda: engine.steps if engine is not None else 0)
    time_of = step_time(executor, settings["rows"], settings["chunk"])
    prefixes = None
    if settings["rules"]:
        prefixes = Prefixes(executor, settings["rules"], settings["prefix_bytes"], log, note)
    engine = Engine(
        executor, time_of, rows=settings["rows"], kv=settings["kv"], chunk=settings["chunk"],
        queue=settings["queue"], prefixes=prefixes, log=log, own=policies, branching=named[own.BRANCHING],
        admission=named[own.ADMISSION], admitted=admitted, note=note,
    )  # fmt: skip
    generation = executor.ready.model.generation_config
    drawn = (
        (generation.temperature, generation.top_p, generation.top_k) if generation.do_sample else (None,) * 3
    )
    ends = [executor.ready.config.eos_token_id, generation.eos_token_id]
    return engine, {
        "dtype": str(executor.dtype).removeprefix("torch."), "threads": f"{threads}{why}",
        "limit": executor.limit, "vocabulary": executor.vocabulary,
        # where a request says nothing: the model's own, else OpenAI's
        "sampling": [
            usual if value is None else value for value, usual in zip(drawn, (1.0, 1.0, 0), strict=True)
        ],
        "stop": sorted({end for each in ends if each is not None for end in np.atleast_1d(each).tolist()}),
        "kv_tokens": engine.limits.kv,
        "time": asdict(time_of),
        "token_bytes": executor.token_bytes, "state_bytes": executor.state_bytes,
    }  # fmt: skip


def idle_cores() -> tuple[int, int]:
    """How many of the cores that this process may use are idle, and how many there are. A thread that waits
    at every product for one whose core others use makes a step many times as long: so none gets a core that
    somebody has."""
    spent = psutil.cpu_times_percent(SPAN, percpu=True)
    own = [spent[core] for core in os.sched_getaffinity(0) if core < len(spent)]
    return sum(times.idle + times.iowait >= IDLE for times in own), len(own)


if __name__ == "__main__":
    main(int(sys.argv[1]))
