"""Faults strike here: at the named points that a training program and its checkpointer pass."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from windtunnel.training.elastic.faults import Fault, InjectedError, matches, parse
from windtunnel.training.elastic.live.link import Link

_TO_AGENT = {"kill": "kill-host", "kill-agent": "kill-agent", "wipe": "wipe-memory"}
_UNTIL_KILLED = 60.0  # seconds that an agent may take to kill this process


class Injector:
    """The job's faults, seen from one trainer.

    What has struck is remembered in the run's folder, one file a stroke, made exclusively: so a fault strikes
    once in a job also when several processes pass its point at once or a new process passes it again.
    """

    def __init__(self, texts: list[str], folder: Path, link: Link) -> None:
        self._faults = [parse(text) for text in texts]
        self._folder = folder / "faults"
        self._link = link
        if self._faults:
            self._folder.mkdir(parents=True, exist_ok=True)

    def at(self, point: str, step: int | None, rank: int, place: int, generation: int) -> None:
        """Strike with every fault that matches.

        Raises:
            InjectedError: a ``raise:`` did.
        """
        for number, fault in enumerate(self._faults):
            fired = len(list(self._folder.glob(f"{number}.*")))
            if matches(fault, point, step, rank, place, generation, fired) and self._claim(number, fired):
                told = {"fault": fault.text, "place": place, "rank": rank, "generation": generation}
                self._link.send("event", kind="injected", t=time.time(), **told)
                self._strike(fault)

    def _claim(self, number: int, fired: int) -> bool:
        try:
            os.close(os.open(self._folder / f"{number}.{fired}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _strike(self, fault: Fault) -> None:
        if fault.action == "raise":
            raise InjectedError(f"injected: {fault.text}")
        if fault.action == "exit":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(fault.status)
        if fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "kill" and fault.host is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._ask_agent(fault)

    def _ask_agent(self, fault: Fault) -> None:
        more: dict[str, Any] = {}
        if fault.action == "slow":
            more["rate"] = fault.rate
        if fault.shard:
            more["shard"] = fault.shard
        self._link.send("inject", action=_TO_AGENT.get(fault.action, fault.action), **more)
        if fault.action in ("kill", "kill-agent"):
            time.sleep(_UNTIL_KILLED)
            raise InjectedError(f"{fault.text}: the agent did not do it within {_UNTIL_KILLED:g} s")
