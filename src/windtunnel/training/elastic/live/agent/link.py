"""The agent's attendance at the supervisor, and what it calls there (`live.calls`).

It attends for ever, and nothing that it says is lost in between: calls wait in their order, each until the
supervisor has it. Every attendance begins with a ``hello`` that tells all that is still open; the ``welcome``
makes the link. Where nothing comes for `SILENCE` seconds the connection is cut off, or the supervisor is
stopped: it is made anew, with it or with the one that follows it.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from windtunnel.base import remote, wire
from windtunnel.base.errors import WindtunnelError
from windtunnel.base.keys import Keys
from windtunnel.training.elastic.live.calls import Hello, Message, Supervision

PAUSE = 0.05
"""Seconds between two tries."""
SILENCE = 5.0
KEPT = 4096
Call = tuple[str, dict[str, Any], Callable[[Any], object]]
_FAILURES = (OSError, WindtunnelError)
AT_ONCE = 32
"""Hosts that are looked for at once."""
_NO_WAY = {
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT,
    errno.EINVAL, errno.EACCES,  # routes of the kinds blackhole and prohibit
}  # fmt: skip


def _ignore(value: object) -> None:
    pass


_BEAT: Call = ("beat", {}, _ignore)


class SupervisorLink:
    """``hello()`` makes the first message of each attendance, ``deliver(message)`` gets all that comes."""

    def __init__(
        self, address: str, keys: Keys, hello: Callable[[], Hello], deliver: Callable[[Message], object]
    ) -> None:
        self.last_message = time.monotonic()
        self._remote = remote.RemoteLink(f"tcp:{address}", keys=keys, timeout=SILENCE)
        self._hello, self._deliver = hello, deliver
        self._beat = 0.2
        self._changed = threading.Condition()
        self._number: int | None = None  # of the attendance, while it is welcome
        self._waiting: deque[Call] = deque(maxlen=KEPT)
        self._ended = threading.Event()
        self._sender = threading.Thread(target=self._send_for_ever, name="link-send", daemon=True)

    def start(self) -> None:
        """Begin to attend."""
        threading.Thread(target=self._attend_for_ever, name="link-attend", daemon=True).start()
        self._sender.start()

    def send(self, op: str, then: Callable[[Any], object] = _ignore, **fields: Any) -> None:
        """Call ``op`` of `Supervision`, as soon as what was sent before is there; ``then`` gets its result,
        in another thread."""
        with self._changed:
            self._waiting.append((op, fields, then))
            self._changed.notify_all()

    def meet(self, generation: int, said: dict[str, str]) -> None:
        """`send` this, in one call with what of the kind was said last and waits."""
        with self._changed:
            if len(self._waiting) > 1:  # the first may be under way
                op, fields, _ = self._waiting[-1]
                if op == "meet" and fields["generation"] == generation:
                    self._waiting.pop()
                    said = fields["said"] | said
            self.send("meet", generation=generation, said=said)

    def flush(self, timeout: float) -> None:
        """Wait until the supervisor has all that was sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Say no more."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._sender.join(2.0)

    def _attend_for_ever(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(*_FAILURES):
                self._remote.call(Supervision, "attend", "", self._hello(), self._take)
            self._number = None
            self._ended.wait(PAUSE)

    def _take(self, message: Message, _: bytes) -> None:
        self.last_message = time.monotonic()
        if message["op"] == "welcome":
            with self._changed:
                self._number, self._beat = message["link"], message["beat"]
                self._changed.notify_all()
        self._deliver(message)

    def _send_for_ever(self) -> None:
        while not self._ended.is_set():
            with self._changed:
                self._changed.wait_for(self._is_due, self._beat)
                number, call = self._number, self._waiting[0] if self._waiting else _BEAT
            if number is None:
                continue
            op, fields, then = call
            try:
                value = self._remote.call(Supervision, op, "", number, **fields)
            except _FAILURES:
                self._ended.wait(PAUSE)
                continue
            self.last_message = time.monotonic()
            with self._changed:
                if self._waiting and self._waiting[0] is call:
                    self._waiting.popleft()
                    self._changed.notify_all()
            then(value)

    def _is_due(self) -> bool:
        return self._ended.is_set() or (self._number is not None and bool(self._waiting))


def silent(hosts: Mapping[int, str], within: float) -> list[int]:
    """Those of ``hosts`` ("host:port" of a memory service each, "" for none) of which nothing comes
    ``within`` seconds, when a connection is tried and no word is said.

    A refusal is an answer, and the kernel accepts for a process that stands still; so silence is the
    network's or the whole host's. An error of this host's own says nothing about another.
    """
    reachable = [host for host, address in hosts.items() if address]
    if not reachable:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(reachable)), thread_name_prefix="windtunnel-reach") as pool:
        answers = pool.map(lambda host: _answers(hosts[host], within), reachable)
        return sorted(host for host, there in zip(reachable, answers, strict=True) if not there)


def _answers(address: str, within: float) -> bool:
    try:
        wire.connect(address, within).close()
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NO_WAY
    return True
