"""``windtunnel serve`` with a model: the run, its event log, the engine, and the port, until it is told to
stop."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import uvicorn

from windtunnel.base.errors import UserError
from windtunnel.base.policyfile import Policy
from windtunnel.base.web import WebServer, listen
from windtunnel.serving.engine.calibrate import step_time
from windtunnel.serving.engine.live.families import load
from windtunnel.serving.engine.live.loop import ServingEngine
from windtunnel.serving.engine.live.prefixes import Prefixes
from windtunnel.serving.engine.live.sampling import Sampling
from windtunnel.serving.engine.live.server import GRACE, Defaults, ModelService, build
from windtunnel.serving.engine.live.thread import EngineThread
from windtunnel.serving.engine.live.tokens import tokenizer
from windtunnel.serving.engine.model import Objective
from windtunnel.serving.engine.policies import ADMISSION, BRANCHING, choose_policies, event_notes
from windtunnel.serving.engine.settings import NO_CACHE, ServeSettings
from windtunnel.store import eventlog
from windtunnel.store.runs import Store

CAPABILITY = "serving.engine"
KV_BYTES, PREFIX_BYTES = 2 << 30, 1 << 30
"""Of running requests and of the prefix cache, where nothing else is asked for."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Of weights; auto: as the model's config has them."""
SPAN, IDLE = 0.3, 90.0
"""Seconds for which cores are watched, and the percentage of these in which an idle one does nothing."""


def serve(settings: ServeSettings, ready: Callable[[str, str], None] = lambda url, run: None) -> None:
    """Until SIGTERM or SIGINT. ``ready`` is told the address and the run as soon as requests are answered.

    Raises:
        UserError: the model cannot be served, or nobody may listen there.
        ScriptError: a policy of the user's failed.
        LessError: the engine failed.
    """
    rules = settings.cache_rules or NO_CACHE
    names, policies = choose_policies(settings.branching, settings.admission, rules)
    if settings.dtype not in DTYPES:
        raise UserError(f"serve: `dtype` {settings.dtype!r} is unknown; accepted are {', '.join(DTYPES)}")
    sock = listen("serve", settings.host, settings.port)
    run = Store.open().begin(CAPABILITY, {"command": "serve", **asdict(settings)}, settings.seed)
    with sock, run.failing():
        engine, about = load_engine(settings, names, policies, run.directory / eventlog.NAME)
        print(
            f"windtunnel serve: weights are {about['dtype']}, threads: {about['threads']}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        facts = asyncio.run(_serve(settings, engine, sock, lambda url: ready(url, run.id)))
        run.finish({**facts, "model": about})


def load_engine(
    settings: ServeSettings, names: dict[str, str], policies: dict[str, Policy], events: Path
) -> tuple[ServingEngine, dict[str, Any]]:
    """The engine by the settings, and what the run's summary says of it."""
    threads, why = settings.threads, ""
    if not threads:
        idle, cores = count_idle_cores()
        threads = max(1, min(torch.get_num_threads(), idle))
        why = f" ({idle} of {cores} cores were idle)"
    torch.set_num_threads(threads)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    executor = load(settings.model, settings.device, settings.seed, dtype)
    engine: ServingEngine | None = None
    log = note = None
    if settings.every:
        steps: Callable[[], int] = lambda: engine.steps if engine is not None else 0  # noqa: E731
        log, note = event_notes(eventlog.EventLog(events), settings.every, steps)
    time_of = step_time(executor, settings.rows, settings.chunk)
    prefixes = None
    if rules := settings.cache_rules:
        prefixes = Prefixes(executor, rules, settings.prefix_bytes or PREFIX_BYTES, log, note)
    engine = ServingEngine(
        executor, time_of, rows=settings.rows, kv=settings.kv or KV_BYTES, chunk=settings.chunk,
        queue=settings.queue, prefixes=prefixes, log=log, own=policies, branching=names[BRANCHING],
        admission=names[ADMISSION], note=note,
    )  # fmt: skip
    return engine, {
        "dtype": str(executor.dtype).removeprefix("torch."), "threads": f"{threads}{why}",
        "limit": executor.limit, "vocabulary": executor.vocabulary, "kv_tokens": engine.limits.kv,
        "time": asdict(time_of), "token_bytes": executor.token_bytes, "state_bytes": executor.state_bytes,
    }  # fmt: skip


def count_idle_cores() -> tuple[int, int]:
    """How many of the cores that this process may use are idle, and how many there are. A thread that waits
    at every product for one whose core others use makes a step many times as long: so none gets a core that
    somebody has."""
    spent = psutil.cpu_times_percent(SPAN, percpu=True)
    own = [spent[core] for core in os.sched_getaffinity(0) if core < len(spent)]
    return sum(times.idle + times.iowait >= IDLE for times in own), len(own)


def defaults(engine: ServingEngine, settings: ServeSettings) -> Defaults:
    """Where a request says nothing: the model's own, else OpenAI's."""
    ready = engine.executor.ready
    config = ready.model.generation_config
    sampling = Sampling(temperature=1.0)
    if config.do_sample:
        options = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
        sampling = replace(sampling, **{name: value for name, value in options.items() if value is not None})
    ends = [end for end in (ready.config.eos_token_id, config.eos_token_id) if end is not None]
    stop = frozenset(token for end in ends for token in np.atleast_1d(end).tolist())
    return Defaults(stop, sampling, Objective.of(settings.ttft, settings.tpot))


async def _serve(
    settings: ServeSettings, engine: ServingEngine, sock: socket.socket, ready: Callable[[str], None]
) -> dict[str, float]:
    name = settings.name or Path(settings.model).name
    thread = EngineThread(engine)
    try:
        service = ModelService(thread, tokenizer(settings.model), name, defaults(engine, settings))
        config = uvicorn.Config(
            build(service),
            # which bounds what a request may be, answers what is no HTTP, and serves who offers HTTP/2
            http="h11",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE,
        )
        server = WebServer(config)
        server.end_on_signals()
        host, port = sock.getsockname()[:2]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        thread.at_end = lambda: setattr(server, "should_exit", True)
        await server.serve(sockets=[sock])
        if thread.wrong is not None:
            raise thread.wrong
    finally:
        await thread.close()
    return engine.facts()
