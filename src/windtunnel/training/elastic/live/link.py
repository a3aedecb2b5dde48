"""A trainer's connection to the agent of its host: one socket, one thread that listens and beats.

The thread learns of newer generations while the program computes or is blocked, and cuts its process group
at once; it keeps what was decided; and it sends a heartbeat, so that a frozen process is noticed. When the
connection is lost the agent is gone, and with it this host's place in the job: the process ends. So it
does when the program does not come out of a group that was cut (`stuck`): then the agent starts it anew.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base import wire
from windtunnel.linux.sockets import opening
from windtunnel.training.elastic.deadlines import seconds
from windtunnel.training.elastic.model import Membership


class Stillness:
    """Watches the thread ``tid`` (as the kernel counts) of this process, from another thread."""

    def __init__(self, tid: int) -> None:
        self._status = Path(f"/proc/self/task/{tid}/status")
        self._seen: tuple[str, ...] = ()
        self._since = 0.0

    def begin(self) -> None:
        self._seen = self._switches()
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long it has slept without a single wake-up, as far as was seen since `begin`.

        A thread that computes, that waits for a processor, or that is woken by data as it comes in, is never
        still: what counts is the kernel's count of its switches.
        """
        switches = self._switches()
        if not switches or switches != self._seen:
            self.begin()
        return time.monotonic() - self._since

    def _switches(self) -> tuple[str, ...]:
        """Empty unless it sleeps."""
        lines = self._status.read_text().splitlines()
        if not any(line.startswith("State:\tS") for line in lines):
            return ()
        return tuple(line for line in lines if "ctxt_switches" in line)


_BEAT = 0.2  # seconds between heartbeats unless the agent says otherwise
_PATIENCE = 10.0  # seconds that the rest of a message may take


class Link:
    """``lost``: called in the listening thread when the agent is gone.

    Raises:
        OSError: there is no agent at ``address``, or it does not answer within ``timeout``.
    """

    def __init__(self, address: str, rank: int, timeout: float, lost: Callable[[str], None]) -> None:
        with opening:
            self._sock = wire.connect(address, timeout)
        self._lost = lost
        self._stuck: Callable[[], None] = lambda: None
        self._stillness = Stillness(threading.get_native_id())
        self._was_cut = False  # and nobody has formed another group since
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._decided: dict[tuple[int, str], dict[int, Any]] = {}
        self._answers: dict[str, dict[int, Any] | None] = {}
        self._cut: tuple[int, Callable[[], Any]] | None = None
        self._step: int | None = None
        self._closed = False
        wire.send(self._sock, {"op": "hello", "rank": rank, "pid": os.getpid()})
        welcome, following = wire.receive(self._sock)
        wire.skip(self._sock, following)
        self.membership = Membership.of(welcome["membership"])
        self.place: int | None = welcome["place"]
        self.host: int = welcome["host"]
        self.memory: str | None = welcome.get("memory_path")
        self.faults: list[str] = welcome.get("faults") or []
        self.config: dict[str, float] = {**seconds("trainer", {}), **(welcome.get("config") or {})}
        # without a move after a cut: a thread that was let out moves within milliseconds
        self._may_stand = self.config["cut"]
        self._sock.settimeout(_PATIENCE)
        _links.add(self)
        self._thread = threading.Thread(target=self._listen, name="windtunnel-link", daemon=True)
        self._thread.start()

    def newest(self) -> tuple[Membership, int | None]:
        """The newest membership that is known, and this host's place in it."""
        with self._changed:
            return self.membership, self.place

    def watch(self, generation: int, cut: Callable[[], Any], stuck: Callable[[], None]) -> None:
        """Call ``cut`` (from the listening thread) as soon as ``generation`` is superseded; now, if it is.

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

    def agree(
        self, generation: int, key: str, rank: int, value: Any, timeout: float
    ) -> dict[int, Any] | None:
        """Post ``value`` and wait for those of all ranks; None when a newer generation comes instead.

        Raises:
            TimeoutError: not all ranks have posted within ``timeout``.
        """
        self.send("post", generation=generation, key=key, rank=rank, value=value)
        with self._changed:
            self._changed.wait_for(
                lambda: (generation, key) in self._decided or self.membership.generation > generation, timeout
            )
            if (generation, key) in self._decided:
                return self._decided.pop((generation, key))
            if self.membership.generation > generation:
                return None
        raise TimeoutError(f"not all ranks came to {key!r} within {timeout:g} s")

    def ask(self, generation: int, key: str, timeout: float) -> dict[int, Any] | None:
        """What was decided for a durable ``key``, in whichever generation; None if nothing was.

        Raises:
            TimeoutError: no answer within ``timeout``.
        """
        with self._changed:
            self._answers.pop(key, None)
        self.send("ask", generation=generation, key=key)
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._answers, timeout):
                raise TimeoutError(f"no answer about {key!r} within {timeout:g} s")
            return self._answers.pop(key)

    def at_step(self, step: int) -> None:
        """The heartbeats say from now on that ``step`` is finished."""
        self._step = step

    def send(self, op: str, **fields: Any) -> None:
        """One message to the agent; it is in the agent's hands when this returns, even if we die then."""
        try:
            with self._sending:
                wire.send(self._sock, {"op": op, **fields})
        except OSError as error:
            self._gone(error)

    def close(self) -> None:
        self._closed = True
        with self._sending:
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_PATIENCE)
        self._sock.close()

    def _listen(self) -> None:
        beat = float(self.config.get("beat", _BEAT))
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        due = time.monotonic()
        while not self._closed:
            try:
                if time.monotonic() >= due:
                    self.send("beat", step=self._step)
                    due = time.monotonic() + beat
                if poll.poll(max(0.0, due - time.monotonic()) * 1000):
                    message, following = wire.receive(self._sock)
                    wire.skip(self._sock, following)
                    self._heard(message)
                with self._changed:  # so that nobody forms a group between the look and the deed
                    if self._was_cut and self._stillness.seconds() > self._may_stand:
                        self._stuck()
            except OSError as error:
                self._gone(error)
                return

    def _heard(self, message: dict[str, Any]) -> None:
        op = message["op"]
        cut = None
        with self._changed:
            if op == "membership":
                membership = Membership.of(message["membership"])
                if membership.generation <= self.membership.generation:
                    return
                self.membership, self.place = membership, message["place"]
                self._decided.clear()  # of generations that nobody waits in any more
                if self._cut is not None and self._cut[0] < membership.generation:
                    cut, self._was_cut = self._cut[1], True
                    self._stillness.begin()
            elif op == "decided" and message["generation"] == self.membership.generation:
                self._decided[message["generation"], message["key"]] = _by_rank(message["values"])
            elif op == "answer":
                values = message["values"]
                self._answers[message["key"]] = None if values is None else _by_rank(values)
            self._changed.notify_all()
        if cut is not None:
            cut()

    def _gone(self, error: OSError) -> None:
        if not self._closed:
            self._closed = True
            self._lost(str(error))


def _by_rank(values: dict[str, Any]) -> dict[int, Any]:
    return {int(rank): values[rank] for rank in sorted(values, key=int)}


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a data loader's worker) must not hold the connection open when its parent dies."""
    for link in list(_links):
        link._sock.close()


os.register_at_fork(after_in_child=_forget_in_child)
