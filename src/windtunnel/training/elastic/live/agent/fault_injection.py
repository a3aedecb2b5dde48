"""Faults that strike a whole host: what a fault point in a worker asks its agent to do.

The worker has told of the fault before it asks, so the event is on its way to the supervisor before the blow.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.linux import network

if TYPE_CHECKING:
    from windtunnel.training.elastic.live.agent.agent import Agent

HEADER = 4096  # bytes of a slot before its data


def host(agent: Agent, message: dict[str, Any]) -> None:
    """Do ``action``: kill-host, kill-agent, wipe-memory, flip (a bit of ``shard``, or of all that is held),
    down or slow (the network link, to ``rate`` bytes/s)."""
    action = message["action"]
    if action == "kill-host":
        kill_host(agent)
    elif action == "kill-agent":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "wipe-memory":
        wipe(agent.memory)
    elif action == "flip":
        flip(agent.memory, message.get("shard", ""))
    elif agent.config.interface is None:
        agent.event("note", text=f"{action}: this host's network is shared (--network netns has one each)")
    elif action == "down":
        network.set_link(agent.config.interface, up=False)
    elif action == "slow":
        network.set_rate(agent.config.interface, message["rate"])


def kill_host(agent: Agent) -> None:
    """A host that loses power: its workers, its memory and its agent are gone at once."""
    for worker in agent.workers.living():
        agent.workers.kill(worker)
    shutil.rmtree(agent.memory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def slots(folder: Path, shard: str = "") -> list[Path]:
    """The files under ``folder`` that hold a shard (SHARD.….slot), of one shard or of all."""
    return sorted(folder.rglob(f"{shard or '*'}.*.slot"))


def wipe(folder: Path) -> None:
    """Remove every slot; sockets stay."""
    for path in slots(folder):
        path.unlink(missing_ok=True)


def flip(folder: Path, shard: str) -> int:
    """Flip a bit in the middle of the data of every slot (of ``shard``, "" for all): how many."""
    found = slots(folder, shard)
    for path in found:
        with path.open("r+b") as file:
            file.seek(HEADER + (path.stat().st_size - HEADER) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))
    return len(found)
