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
from windtunnel.training.elastic.faults import LAUNCHER, PROCESS, Fault, matches, parse

if TYPE_CHECKING:
    from windtunnel.training.elastic.live.agent.agent import Agent
    from windtunnel.training.elastic.live.link import AgentLink

_KNOWN = 1.0  # seconds that the supervisor may take to hear of a fault before it strikes
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
            InjectedError: a ``raise:`` did.
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
            inject(fault.action, fault.text)
        else:
            self._ask_agent(fault)

    def _ask_agent(self, fault: Fault) -> None:
        self._link.call("inject", fault.action, fault.rate)
        if fault.action == "kill":
            time.sleep(_UNTIL_KILLED)
            raise InjectedError(f"{fault.text}: the agent did not do it within {_UNTIL_KILLED:g} s")


def inject_on_host(agent: Agent, action: str, rate: float = 0.0) -> None:
    """Do ``action``: kill, down or slow (the network link, to ``rate`` bytes/s); what strikes the launcher is
    passed on. That it strikes is known by then."""
    agent.link.flush(_KNOWN)
    if action == LAUNCHER:
        agent.link.send("kill_launcher", epoch=agent.epoch)
    elif action == "kill":
        kill_host(agent)
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
