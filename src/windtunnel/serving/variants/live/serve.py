"""``windtunnel variants serve``: the run, its event log, the ports, until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from windtunnel.base.errors import UserError
from windtunnel.base.web import WebServer, listen
from windtunnel.serving.variants.live.cluster import ReplicaCluster
from windtunnel.serving.variants.live.gateway import application
from windtunnel.serving.variants.live.registry import registered
from windtunnel.serving.variants.live.service import VariantsService
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store


def serve(
    home: Path, host: str, port: int, rpc: int | None, policy: str, on: str = "",
    ready: Callable[[str, str, str], None] = lambda run, http, rpc: None,
) -> None:  # fmt: skip
    """All that is registered in ``home``, until SIGTERM or SIGINT. ``rpc``: the port of gRPC, 0 for any free
    one. ``ready`` is told the run and both addresses.

    Raises:
        UserError: nothing is registered there, no cluster answers, or nobody may listen on a port.
    """
    entries = registered(home)
    if not entries:
        raise UserError(f"variants serve: nothing is registered in {home}; use windtunnel variants add")
    cluster = ReplicaCluster(on) if on else None
    sock = listen("variants serve", host, port)
    settings = {"command": "variants serve", "home": str(home), "policy": policy, "on": on}
    run = Store.open().begin("serving.variants", settings, 0)
    with sock, run.failing(), closing(EventLog(run.directory / NAME)) as log:
        service = VariantsService(entries, policy=policy, log=log, cluster=cluster)
        run.finish(asyncio.run(_serve(service, sock, host, rpc, partial(ready, run.id))))


async def _serve(
    service: VariantsService,
    sock: socket.socket,
    host: str,
    rpc: int | None,
    ready: Callable[[str, str], None],
) -> dict[str, Any]:
    config = uvicorn.Config(
        application(service), http="h11", log_config=None, access_log=False, timeout_graceful_shutdown=5
    )
    server = WebServer(config)
    server.end_on_signals()
    faults: list[BaseException] = []

    def failing(fault: BaseException) -> None:
        faults.append(fault)
        server.should_exit = True

    service.failing = failing
    other, address, name = None, "", f"[{host}]" if ":" in host else host
    if rpc is not None:
        from windtunnel.serving.variants.live.rpc import listening

        other, rpc_port = await listening(service, f"{name}:{rpc}")
        address = f"{name}:{rpc_port}"
    ready(f"http://{name}:{sock.getsockname()[1]}", address)
    await server.serve(sockets=[sock])
    if other is not None:
        await other.stop(1.0)
    if faults:
        raise faults[0]
    groups = {name: group.group for name, group in service.groups.items()}
    return {
        "answered": {name: group.answered for name, group in groups.items() if group.answered},
        "late": sum(group.missed for group in groups.values()),
        "shed": service.desk.shed.total(),
        "requeued": sum(group.requeued for group in groups.values()),
    }
