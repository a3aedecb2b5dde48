"""The front's end of the worker: jobs in, events out, and another worker when one dies.

A worker that dies takes all tensors with it. Requests that it had admitted fail: their clients may ask again.
Those that waited go to the next worker; where nobody was admitted they fail, too, so that none can kill for
ever. No worker at all, or an error of this module, ends the link: every request fails with the reason,
`wrong`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from windtunnel.base import wire
from windtunnel.base.errors import HostError, UserError, WindtunnelError

STARTS = 3
"""Workers in a row that may die before they are ready."""
DIED = "the worker died while it served this request: ask again"
STOP_SECONDS = 10.0
"""How long a worker may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class Token:
    """One more of a unit; ``logprob`` and ``top`` where they were asked for."""

    job: int
    unit: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ended: bool = False
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """The job is done, or ``refused`` or ``failed`` for a reason."""

    job: int
    refused: str = ""
    failed: str = ""


Event = Token | Over


@dataclass(slots=True)
class Sent:
    """``cached``: tokens of the job's prompt that needed no computing; ``admitted``: by the worker that there
    is."""

    job: dict[str, Any]
    events: asyncio.Queue[Event]
    cached: int = 0
    admitted: bool = False


class Link:
    """Workers with these ``settings``, one at a time. ``about``: what the model is like; ``facts``: the
    latest; ``wrong``: why there is no worker any more."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.about: dict[str, Any] = {}
        self.facts: dict[str, float] = {}
        self.restarts = 0
        self.ready = asyncio.Event()
        self.wrong: WindtunnelError | None = None
        self._jobs: dict[int, Sent] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._life: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Of the worker."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Until the model can be asked.

        Raises:
            UserError: it cannot be served.
            HostError: no worker can.
        """
        self._life = asyncio.create_task(self._live())
        waiting = asyncio.create_task(self.ready.wait())
        await asyncio.wait((self._life, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.wrong is not None:
            raise self.wrong

    async def ended(self) -> None:
        """Until there is no worker any more, and there will be none."""
        assert self._life is not None
        await asyncio.shield(self._life)

    async def close(self) -> None:
        """Ends the worker."""
        self._closing = True
        self._send({"do": "stop"})
        if self._life is not None:
            await asyncio.wait({self._life}, timeout=STOP_SECONDS)
            if not self._life.done() and self._process is not None:
                self._process.kill()
            await self._life

    def submit(self, job: Mapping[str, Any], events: asyncio.Queue[Event]) -> Sent:
        """What comes of ``job`` (as `loop.Job.of` reads it) is put into ``events``, an `Over` at last."""
        self._jobs[job["id"]] = sent = Sent(dict(job), events)
        if self.wrong is not None:
            self._over(job["id"], failed=str(self.wrong))
        elif self.ready.is_set():
            self._send({"do": "add", "job": sent.job})
        return sent

    def cancel(self, number: int) -> None:
        """Nobody waits for it any longer."""
        if self._jobs.pop(number, None) is not None:
            self._send({"do": "cancel", "id": number})

    def end(self, number: int, unit: int) -> None:
        """The unit needs no more tokens."""
        self._send({"do": "end", "id": number, "unit": unit})

    # within

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame(message, 0, None))

    async def _live(self) -> None:
        unready = 0
        try:
            while not self._closing and self.wrong is None:
                await self._worker()
                unready = 0 if self.ready.is_set() else unready + 1
                self.ready.clear()
                if not self._closing:
                    self._died()
                if unready == STARTS:
                    self.wrong = HostError(f"the worker died {STARTS} times before it was ready")
        except Exception as error:  # nobody can be answered any more, whatever it was: that is said
            self.wrong = HostError(f"the link to the worker failed: {type(error).__name__}: {error}")
        self.ready.clear()
        self.wrong = self.wrong or HostError("the server is being stopped")
        for number in list(self._jobs):
            self._over(number, failed=str(self.wrong))

    def _died(self) -> None:
        self.restarts += 1
        self.facts |= {"running": 0.0, "waiting": 0.0, "kv_reserved": 0.0}
        if self.wrong is None:
            lost = [sent for sent in self._jobs.values() if sent.admitted] or list(self._jobs.values())
            for sent in lost:
                self._over(sent.job["id"], failed=DIED)

    async def _worker(self) -> None:
        """One worker's life."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "windtunnel.serving.engine.live.worker", str(theirs.fileno())]
        env = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env
        )
        theirs.close()
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._send(self.settings)
            buffer = bytearray()
            with suppress(OSError):
                while part := await reader.read(1 << 20):
                    buffer += part
                    while (message := wire.parse(buffer, None)) is not None:
                        self._received(message)
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            if self._process.poll() is None and not self._closing:
                self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _received(self, message: dict[str, Any]) -> None:
        if "wrong" in message:
            self.wrong = UserError(message["wrong"])
        elif "ready" in message:
            self.about = message["ready"]
            self.ready.set()
            for sent in self._jobs.values():
                self._send({"do": "add", "job": sent.job})
        else:
            self._report(message)

    def _report(self, message: dict[str, Any]) -> None:
        self.facts = message.get("facts", self.facts)
        for number, cached in message.get("admitted", ()):
            if number in self._jobs:
                self._jobs[number].cached, self._jobs[number].admitted = cached, True
        if "tokens" not in message:
            return
        ended = {(number, unit): stopped for number, unit, stopped in message["ended"]}
        for number, unit, token, *more in message["tokens"]:
            if number not in self._jobs:
                continue
            stopped = ended.pop((number, unit), None)
            logprob, top = more or (None, ())
            self._jobs[number].events.put_nowait(
                Token(number, unit, token, logprob, tuple(top), stopped is not None, bool(stopped))
            )
        for number in message["finished"]:
            self._over(number)
        for number, why in message["refused"]:
            self._over(number, refused=why)
        for number, why in message["failed"]:
            self._over(number, failed=why)

    def _over(self, number: int, *, refused: str = "", failed: str = "") -> None:
        sent = self._jobs.pop(number, None)
        if sent is not None:
            sent.events.put_nowait(Over(number, refused, failed))
