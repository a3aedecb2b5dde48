"""``windtunnel serve`` with a model: the run, its event log, the worker, and the port, until it is told to
stop."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.web import Server, listen
from windtunnel.serving.engine import own
from windtunnel.serving.engine.live.link import Link
from windtunnel.serving.engine.live.server import GRACE, Service, build
from windtunnel.serving.engine.live.tokens import tokenizer
from windtunnel.store import eventlog
from windtunnel.store.runs import Store

CAPABILITY = "serving.engine"
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Of weights; auto: as the model's config has them."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served and how. ``model``: a directory, a ``config.json`` or a name of `families`; ``name``:
    what clients call it. ``kv`` and ``prefix_bytes``: bytes; ``rules``: of the prefix cache. ``every``: of
    so many steps one's decisions are logged (0: none). ``ttft`` and ``tpot``: promised to who does not say,
    seconds. ``threads``: 0 for `worker.idle_cores`. ``dtype``: of `DTYPES`."""

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    branching: str = "taper"
    admission: str = "refuse"
    rows: int = 64
    chunk: int = 512
    kv: int = 2 << 30
    queue: int = 1024
    rules: str = "density"
    prefix_bytes: int = 1 << 30
    device: str = "cpu"
    threads: int = 0
    dtype: str = "auto"
    seed: int = 0
    every: int = 10
    ttft: float | None = None
    tpot: float | None = None


def serve(served: Served, ready: Callable[[str, str], None] = lambda url, run: None) -> None:
    """Until SIGTERM or SIGINT. ``ready`` is told the address and the run as soon as requests are answered.

    Raises:
        UserError: the model cannot be served, or nobody may listen there.
        HostError: there is no worker any more.
    """
    own.chosen(served.branching, served.admission)
    if served.dtype not in DTYPES:
        raise UserError(f"serve: `dtype` {served.dtype!r} is unknown; accepted are {', '.join(DTYPES)}")
    sock = listen("serve", served.host, served.port)
    run = Store.open().begin(CAPABILITY, {"command": "serve", **asdict(served)}, served.seed)
    with sock, run.failing():
        events = run.directory / eventlog.NAME
        run.finish(asyncio.run(_serve(served, sock, events, lambda url: ready(url, run.id))))


async def _serve(
    served: Served, sock: socket.socket, events: Path, ready: Callable[[str], None]
) -> dict[str, Any]:
    link = Link({**asdict(served), "events": str(events)})
    try:
        await link.start()
        name = served.name or Path(served.model).name
        service = Service(link, tokenizer(served.model), name, (served.ttft, served.tpot))
        about = f"weights are {link.about['dtype']}, threads: {link.about['threads']}"
        print(f"windtunnel serve: {about}", file=sys.stderr, flush=True)
        config = uvicorn.Config(
            build(service),
            http="h11",  # which bounds what a request may be, and answers what is no HTTP
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE,
        )
        server = Server(config)
        server.end_when_told()
        host, port = sock.getsockname()[:2]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        watching = asyncio.create_task(_leave(server, link))
        await server.serve(sockets=[sock])
        watching.cancel()
        if link.wrong is not None:
            raise HostError(f"serve: {link.wrong}")
    finally:
        await link.close()
    return {**link.facts, "restarts": link.restarts, "model": link.about}


async def _leave(server: uvicorn.Server, link: Link) -> None:
    """Has ``server`` stop when there is nobody who could answer."""
    await link.ended()
    server.should_exit = True
