"""A trainer's link to the agent of its host: what it calls there (`live.calls`), and one thread that beats.

The answer to a beat tells of newer generations, while the program computes or is blocked: the thread cuts its
process group at once. When the agent is gone, so is this host's place in the job: the process ends. So it
does when the program does not come out of a group that was cut (`stuck`): then the agent starts it anew.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base import remote
from windtunnel.linux.sockets import opening
from windtunnel.training.elastic.live.calls import HostAgent, News, Values
from windtunnel.training.elastic.model import Membership


class Stillness:
    """Watches the thread ``tid`` (as the kernel counts) of this process, from another thread."""

    def __init__(self, tid: int) -> None:
        self._status = Path(f"/proc/self/task/{tid}/status")
        self._last_switches: tuple[str, ...] = ()
        self._since = 0.0

    def begin(self) -> None:
        self._last_switches = self._switches()
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long it has slept without a single wake-up, as far as was seen since `begin`.

        A thread that computes, that waits for a processor, or that is woken by data as it comes in, is never
        still: what counts is the kernel's count of its switches.
        """
        switches = self._switches()
        if not switches or switches != self._last_switches:
            self.begin()
        return time.monotonic() - self._since

    def _switches(self) -> tuple[str, ...]:
        """Empty unless it sleeps."""
        lines = self._status.read_text().splitlines()
        if not any(line.startswith("State:\tS") for line in lines):
            return ()
        return tuple(line for line in lines if "ctxt_switches" in line)


class _AgentCalls(remote.RemoteLink):
    """Its connections are never taken for those of a process group that forms meanwhile."""

    def _dialled(self) -> socket.socket:
        with opening:
            return super()._dialled()


class AgentLink:
    """``lost``: called, in any thread, when the agent is gone, or hears this process no more.

    Raises:
        OSError: there is no agent at ``address``.
    """

    def __init__(self, address: str, lost: Callable[[str], object]) -> None:
        self._calls = _AgentCalls(address)
        self._lost = lost
        self._stuck: Callable[[], object] = lambda: None
        self._stillness = Stillness(threading.get_native_id())
        self._was_cut = False  # and nobody has formed another group since
        self._changed = threading.Condition()
        self._cut: tuple[int, Callable[[], object]] | None = None
        welcome = self._calls.call(HostAgent, "join", "", os.getpid())
        self.membership = Membership.of(welcome.news.membership)
        self.place: int | None = welcome.news.place
        self.host, self.memory, self.faults = welcome.host, welcome.memory, welcome.faults
        self.config: dict[str, float] = welcome.config
        threading.Thread(target=self._beat_for_ever, name="windtunnel-link", daemon=True).start()

    def newest(self) -> tuple[Membership, int | None]:
        """The newest membership that is known, and this host's place in it."""
        with self._changed:
            return self.membership, self.place

    def watch(self, generation: int, cut: Callable[[], object], stuck: Callable[[], object]) -> None:
        """Call ``cut`` (from the beating thread) as soon as ``generation`` is superseded; now, if it is.

        ``stuck`` is called there, too, and again and again, while the thread that made this link has not
        moved for 2 s after the cut.
        """
        with self._changed:
            self._stuck = stuck
            self._cut, self._was_cut = (generation, cut), False
            late = self.membership.generation > generation
        if late:
            cut()

    def newer(self, generation: int, timeout: float = 0.0) -> bool:
        """Whether a newer one than ``generation`` is known, at the latest after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.membership.generation > generation, timeout)

    def agree(self, generation: int, key: str, value: Any, timeout: float) -> Values | None:
        """Post ``value`` and wait for those of all ranks; None when a newer generation comes instead.

        Raises:
            TimeoutError: not all ranks have posted within ``timeout``.
        """
        if self.newer(generation):
            return None
        values: Values | None = self.call("agree", generation, key, value, timeout)
        return values

    def call(self, name: str, *args: Any, **fields: Any) -> Any:
        """A method of `HostAgent`; what it says is in the agent's hands when this returns, even if we die
        then.

        Raises:
            TimeoutError: no answer in the time that was given.
        """
        try:
            return self._calls.call(HostAgent, name, "", os.getpid(), *args, **fields)
        except TimeoutError as error:
            raise TimeoutError(str(error)) from None  # of a peer (`run.of_peers`)
        except OSError as error:
            self._lost(str(error))

    def event(self, kind: str, generation: int, /, **fields: Any) -> None:
        """Something happened just now."""
        self.call("event", kind, {**fields, "generation": generation, "t": time.time()})

    def _beat_for_ever(self) -> None:
        while True:
            news = self.call("beat", self.membership.generation)
            if news is not None:
                self._take(news)
            with self._changed:  # so that nobody forms a group between the look and the deed
                # a thread that was let out moves within milliseconds
                if self._was_cut and self._stillness.seconds() > self.config["cut"]:
                    self._stuck()

    def _take(self, news: News) -> None:
        membership, cut = Membership.of(news.membership), None
        with self._changed:
            self.membership, self.place = membership, news.place
            if self._cut is not None and self._cut[0] < membership.generation:
                cut, self._was_cut = self._cut[1], True
                self._stillness.begin()
            self._changed.notify_all()
        if cut is not None:
            cut()
