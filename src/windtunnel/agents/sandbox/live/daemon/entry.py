"""Open the host of a home and serve it: what ``windtunnel sandbox serve`` and the automatic start run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.client.launch import socket_of
from windtunnel.agents.sandbox.live.daemon.server import held, serve
from windtunnel.agents.sandbox.live.daemon.service import Events
from windtunnel.agents.sandbox.model import Facility

CLOSE_SECONDS = 120.0
"""How long checkpoints under way may take when the daemon ends."""

Open = Callable[[Path, Callable[[Any], None]], Any]


def run(
    home: Path,
    *,
    http: tuple[str, int] | None = None,
    token: str = "",
    idle_seconds: float | None = None,
    allow_remote: bool = False,
    ready: Callable[[str], None] = lambda where: None,
    open_host: Open | None = None,
    doctor: Callable[[], list[Facility]] | None = None,
) -> None:
    """Be the daemon of ``home`` until told to end. Raises UserError where another one is.

    ``open_host`` and ``doctor`` stand in for the real host and its report.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    events = Events()
    with held(home):
        host = (open_host or real_host)(home, events.publish)
        try:
            serve(
                host,
                socket_of(home),
                http=http,
                token=token,
                events=events,
                doctor=doctor or real_doctor,
                idle_seconds=idle_seconds,
                allow_remote=allow_remote,
                ready=ready,
            )
        finally:
            _closed(host)


def real_host(home: Path, on_event: Callable[[Any], None]) -> Any:
    from windtunnel.agents.sandbox.live.host import Host

    return Host(home, on_event=on_event)


def real_doctor() -> list[Facility]:
    from windtunnel.agents.sandbox.live.criu import doctor

    return doctor()


def _closed(host: Any) -> None:
    """Close the host; one whose calls hang must not keep the daemon (and with it the home) for ever."""
    closer = threading.Thread(target=host.close, name="sandbox-close", daemon=True)
    closer.start()
    closer.join(CLOSE_SECONDS)
    if closer.is_alive():
        logging.getLogger("windtunnel.sandbox.daemon").error("the host did not close in %g s", CLOSE_SECONDS)


def end(status: int) -> None:
    """Leave at once: a thread that hangs in the kernel would keep the process from ending."""
    logging.shutdown()
    os._exit(status)
