"""What strikes the parts of a launched job from outside: hosts, agents, workers, the fork server, links."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

from windtunnel.training.launch import Launched


def kill_host(launched: Launched, place: int, *, silent: bool = False) -> None:
    """SIGKILL to the workers and the agent of a host, its memory is lost. ``silent`` (with "netns"): its
    network goes first, so that no peer sees a connection close."""
    status = launched.places()[place]
    if silent:
        set_link(launched, place, up=False)
    for pid in (status["pid"], *status["workers"].values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(status["memory"], ignore_errors=True)


def kill_agent(launched: Launched, place: int) -> None:
    """SIGKILL to an agent alone."""
    os.kill(launched.places()[place]["pid"], signal.SIGKILL)


def kill_worker(launched: Launched, rank: int, number: int = signal.SIGKILL) -> None:
    """A signal to a worker."""
    os.kill(launched.places()[rank // launched.job.per_host]["workers"][rank], number)


def kill_forkserver(launched: Launched) -> None:
    """SIGKILL to the fork server; the launcher starts another."""
    launched.site.forkserver.process.kill()


def set_link(launched: Launched, place: int, *, up: bool) -> None:
    """Take a host's network link down, or up again (needs "netns")."""
    assert launched.network is not None
    name = launched.site.of(launched.places()[place]["pid"]).name
    launched.network.link_up(name) if up else launched.network.link_down(name)
