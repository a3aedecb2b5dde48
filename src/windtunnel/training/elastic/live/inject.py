"""Faults strike here: at the named points that a training program and its checkpointer pass.

What strikes a process is done in it; what strikes a whole host its agent is asked to do. The fault has been
told before, so the event is on its way to the supervisor before it strikes.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.linux import network
from windtunnel.linux.faults import InjectedError, InjectionCounts, inject
from windtunnel.training.checkpoint.model import SLOT_HEADER
from windtunnel.training.elastic.faults import LAUNCHER, PROCESS, Fault, matches, parse

if TYPE_CHECKING:
    from windtunnel.training.elastic.live.agent.agent import Agent
    from windtunnel.training.elastic.live.link import AgentLink

_TO_AGENT = {"kill": "kill-host", "kill-agent": "kill-agent", "wipe": "wipe-memory"}
_TOLD = 1.0  # seconds that the supervisor may take to hear of a fault before it strikes
_UNTIL_KILLED = 60.0  # seconds that an agent may take to kill this process


class Injector:
    """The job's faults, seen from one trainer.

    What has struck is remembered in the run's folder, so that a fault strikes once in a job.
    """

    def __init__(self, texts: list[str], folder: Path, link: AgentLink) -> None:
        self._faults = [parse(text) for text in texts]
        self._counts = InjectionCounts(folder / "faults")
        self._link = link

    def at(self, point: str, step: int | None, rank: int, place: int, generation: int) -> None:
        """Strike with every fault that matches.

        Raises:
            InjectedError, OSError: a ``raise:`` or a ``full:`` did.
        """
        for number, fault in enumerate(self._faults):
            fired = self._counts.count(number)
            now = matches(fault, point, step, rank, place, generation, fired)
            if now and self._counts.claim(number, fired):
                fields = {"fault": fault.text, "place": place, "rank": rank}
                if fault.action == LAUNCHER:
                    fields |= {"place": None, "rank": None, "control": True}
                self._link.event("injected", generation, **fields)
                self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        if fault.action in PROCESS or (fault.action == "kill" and fault.host is None):
            inject(fault.action, fault.text, status=fault.status, seconds=fault.seconds)
        else:
            self._ask_agent(fault)

    def _ask_agent(self, fault: Fault) -> None:
        self._link.call("inject", _TO_AGENT.get(fault.action, fault.action), fault.shard, fault.rate)
        if fault.action in ("kill", "kill-agent"):
            time.sleep(_UNTIL_KILLED)
            raise InjectedError(f"{fault.text}: the agent did not do it within {_UNTIL_KILLED:g} s")


def inject_on_host(agent: Agent, action: str, shard: str = "", rate: float = 0.0) -> None:
    """Do ``action``: kill-host, kill-agent, wipe-memory, flip (a bit of ``shard``, or of all that is held),
    down or slow (the network link, to ``rate`` bytes/s); what strikes the launcher is passed on. That it
    strikes is known by then."""
    agent.link.flush(_TOLD)
    if action == LAUNCHER:
        agent.link.send("kill_launcher", epoch=agent.epoch)
    elif action == "kill-host":
        kill_host(agent)
    elif action == "kill-agent":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "wipe-memory":
        wipe(agent.memory)
    elif action == "flip":
        flip(agent.memory, shard)
    elif agent.config.interface is None:
        agent.event("note", text=f"{action}: this host's network is shared (--network netns has one each)")
    elif action == "down":
        network.set_link(agent.config.interface, up=False)
    elif action == "slow":
        network.set_rate(agent.config.interface, rate)


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
    paths = slots(folder, shard)
    for path in paths:
        with path.open("r+b") as file:
            file.seek(SLOT_HEADER + (path.stat().st_size - SLOT_HEADER) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))
    return len(paths)
