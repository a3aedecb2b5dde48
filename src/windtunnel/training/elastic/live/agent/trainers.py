"""What the trainers of a host call at its agent (`calls.HostAgent`), each in a thread of its own.

What is said is handed to the agent's thread before the call returns. So a trainer's last words are there
before the word of its end.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windtunnel.linux import network
from windtunnel.training.elastic.faults import LAUNCHER
from windtunnel.training.elastic.live.calls import Message, News, TrainerWelcome, Values

if TYPE_CHECKING:
    from windtunnel.training.elastic.live.agent.agent import Agent
    from windtunnel.training.elastic.live.agent.workers import TrainerProcess

PATIENCE = 10.0
_KNOWN = 1.0  # seconds that the supervisor may take to hear of a fault before it strikes
Answer = Callable[[Any], object]


def nobody(pid: int) -> OSError:
    """What one gets that is no trainer here, or no more."""
    return OSError(errno.ESRCH, f"process {pid} is no trainer of this host")


class Trainers:
    """Serves ``agent``."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def join(self, pid: int) -> TrainerWelcome:
        agent = self._agent
        welcome: TrainerWelcome = _answered(
            "welcome", PATIENCE, lambda put: agent.do(lambda: agent.welcome(pid, put))
        )
        return welcome

    def beat(self, pid: int, generation: int) -> News | None:
        agent = self._agent
        if pid not in agent.leases.last_signs:
            raise nobody(pid)
        agent.leases.renew(pid, time.monotonic())
        return agent.news(generation, agent.config.worker["beat"])

    def agree(self, pid: int, generation: int, key: str, value: Any, within: float) -> Values | None:
        agent = self._agent

        def ask(put: Answer) -> None:
            agent.do(lambda: agent.agree(pid, generation, key, value, put))

        values: Values | None = _answered(f"all ranks came to {key!r}", within, ask)
        return values

    def ask(self, pid: int, key: str, within: float) -> Values | None:
        def ask(put: Answer) -> None:
            self._agent.link.send("ask", put, key=key)

        values: Values | None = _answered(f"an answer about {key!r} came", within, ask)
        return values

    def meet(
        self, generation: int, said: dict[str, str], keys: list[str], within: float
    ) -> dict[str, str] | None:
        return self._agent.meet(generation, said, keys, within)

    def compare_set(
        self, generation: int, key: str, expected: str, desired: str, within: float
    ) -> tuple[bool, str] | None:
        about = {"generation": generation, "key": key, "expected": expected, "desired": desired}
        answer: tuple[bool, str] | None = _answered(
            f"a word on {key!r} came", within, lambda put: self._agent.link.send("compare_set", put, **about)
        )
        return answer

    def event(self, pid: int, kind: str, fields: Message) -> None:
        self._of(pid, lambda worker: self._agent.event(kind, **{"rank": worker.rank, **fields}))

    def suspect(self, pid: int, generation: int, error: str) -> None:
        about: Message = {"generation": generation, "error": error}
        self._of(pid, lambda worker: self._agent.link.send("suspect", rank=worker.rank, **about))

    def done(self, pid: int, result: Any) -> None:
        self._of(pid, lambda worker: self._agent.finish(worker, result))

    def failed(self, pid: int, error: str, less: bool = False) -> None:
        self._of(pid, lambda worker: worker.fail(error, less=less))

    def inject(self, pid: int, action: str, rate: float = 0.0) -> None:
        self._of(pid, lambda worker: inject_on_host(self._agent, action, rate))

    def _of(self, pid: int, deed: Callable[[TrainerProcess], object]) -> None:
        """Done in the agent's thread, for a trainer that is one then."""

        def do() -> None:
            worker = self._agent.workers.of_pid(pid)
            if worker is not None and not worker.stopped:
                deed(worker)

        self._agent.do(do)


def _answered(what: str, within: float, ask: Callable[[Answer], None]) -> Any:
    """What is put, which may be an exception to raise. Raises TimeoutError."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ask(answers.put)
    try:
        answer = answers.get(timeout=within)
    except queue.Empty:
        raise TimeoutError(f"not {what} within {within:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def inject_on_host(agent: Agent, action: str, rate: float = 0.0) -> None:
    """Do ``action``: kill, down or slow (the network link, to ``rate`` bytes/s); what strikes the launcher is
    passed on. That it strikes is known by then."""
    agent.link.flush(_KNOWN)
    if action == LAUNCHER:
        agent.link.send("kill_launcher", epoch=agent.epoch)
    elif action == "kill":
        kill_host(agent)
    elif agent.config.namespace is None:
        agent.event("note", text=f"{action}: this host's network is shared (--network netns has one each)")
    elif action == "down":
        network.set_link(network.INTERFACE, up=False)
    elif action == "slow":
        network.set_rate(network.INTERFACE, rate)


def kill_host(agent: Agent) -> None:
    """A host that loses power: its workers, its memory and its agent are gone at once."""
    for worker in agent.workers.living():
        agent.workers.kill(worker)
    shutil.rmtree(agent.memory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
