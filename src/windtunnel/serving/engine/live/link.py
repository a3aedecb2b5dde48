"""The front's end of the worker: jobs in, events out, and another worker when one dies.

A worker that dies in mid-step takes all tensors with it, and nothing else: a token depends on the prompt,
the seed and its number alone. So the next worker goes on where the dead one was: a request of one unit is
given what was told of its answer behind its prompt; one with branches is computed anew and told from where
it had come to, which is checked token for token. One that took part in `CRASHES` deaths fails, so that none
can kill for ever.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from windtunnel.base import wire
from windtunnel.base.errors import HostError, UserError

CRASHES = 3
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
class _Sent:
    """``told``: tokens by unit; ``ahead``: of these, what a new worker has yet to repeat; ``closed``: units
    that need no more."""

    job: dict[str, Any]
    events: asyncio.Queue[Event]
    told: dict[int, list[int]] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    cached: int = 0
    crashes: int = 0


class Link:
    """Workers with these ``settings``, one at a time. ``about``: what the model is like; ``facts``: the
    latest."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.about: dict[str, Any] = {}
        self.facts: dict[str, float] = {}
        self.restarts = 0
        self.ready = asyncio.Event()
        self.wrong = ""
        self._jobs: dict[int, _Sent] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._life: asyncio.Task[None] | None = None
        self._closing = False
        self._heard_at = 0.0

    @property
    def pid(self) -> int | None:
        """Of the worker."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Until the model can be asked.

        Raises:
            UserError: it cannot be served.
        """
        self._life = asyncio.create_task(self._live())
        waiting = asyncio.create_task(self.ready.wait())
        await asyncio.wait((self._life, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self.ready.is_set():
            raise UserError(self.wrong) if self.wrong else HostError("the worker ended before it was ready")

    async def close(self) -> None:
        """Ends the worker."""
        self._closing = True
        self._send({"do": "stop"})
        if self._life is not None:
            await asyncio.wait({self._life}, timeout=STOP_SECONDS)
            if not self._life.done() and self._process is not None:
                self._process.kill()
            await self._life

    def submit(self, job: Mapping[str, Any], events: asyncio.Queue[Event]) -> None:
        """What comes of ``job`` (as `worker.job` reads it) is put into ``events``, an `Over` at last."""
        self._jobs[job["id"]] = sent = _Sent(dict(job), events)
        if self.wrong:
            self._over(job["id"], failed=self.wrong)
        elif self.ready.is_set():
            self._send({"do": "add", "job": sent.job})

    def cancel(self, number: int) -> None:
        """Nobody waits for it any longer."""
        if self._jobs.pop(number, None) is not None:
            self._send({"do": "cancel", "id": number})

    def end(self, number: int, unit: int) -> None:
        """The unit needs no more tokens."""
        if number in self._jobs:
            self._jobs[number].closed.add(unit)
        self._send({"do": "end", "id": number, "unit": unit})

    def cached(self, number: int) -> int:
        """Tokens of the job's prompt that needed no computing; while it runs."""
        return self._jobs[number].cached if number in self._jobs else 0

    def silent(self) -> float:
        """Seconds for which the worker has told nothing, though it had work."""
        since = min((sent.job["arrival"] for sent in self._jobs.values()), default=inf)
        return max(0.0, time.monotonic() - max(since, self._heard_at))

    # within

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame(message, 0, None))

    async def _live(self) -> None:
        unready = 0
        try:
            while not self._closing and not self.wrong and unready < CRASHES:
                await self._worker()
                unready = 0 if self.ready.is_set() else unready + 1
                self.ready.clear()
                if not self._closing:
                    self._died()
            if unready == CRASHES:
                self.wrong = f"the worker died {CRASHES} times before it was ready"
        finally:
            self.ready.clear()
            self.wrong = self.wrong or "the server is being stopped"
            for number in list(self._jobs):
                self._over(number, failed=self.wrong)

    def _died(self) -> None:
        self.restarts += 1
        self.facts |= {"running": 0.0, "waiting": 0.0, "kv_reserved": 0.0}
        for number, sent in list(self._jobs.items()):
            sent.crashes += 1
            if sent.crashes >= CRASHES:
                self._over(number, failed=f"{CRASHES} workers died while they served this request")

    async def _worker(self) -> None:
        """One worker's life."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "windtunnel.serving.engine.live.worker", str(theirs.fileno())]
        env = {"TRANSFORMERS_VERBOSITY": "error", **os.environ}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self.settings)
        buffer = bytearray()
        with suppress(OSError):
            while part := await reader.read(1 << 20):
                buffer += part
                while (message := wire.parse(buffer, None)) is not None:
                    self._heard(message)
        self._writer.close()
        self._writer = None
        if self._process.poll() is None and not self._closing:
            self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def _heard(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        if "wrong" in message:
            self.wrong = message["wrong"]
        elif "ready" in message:
            self.about = message["ready"]
            self.ready.set()
            for number in list(self._jobs):
                self._again(number)
        else:
            self._report(message)

    def _again(self, number: int) -> None:
        """To a new worker, with what was told already."""
        sent = self._jobs[number]
        told, job = sent.told.get(0, []), {**sent.job, "again": True}
        if sent.told:  # its first token was in time, or late then
            job["objective"] = (None, job["objective"][1])
        if len(job["stages"]) == 1 and isinstance(job["stages"][0], int):
            left = [job["stages"][0] - len(told)]
            job = {**job, "prompt": [*job["prompt"], *told], "stages": left, "had": len(told)}
        else:
            sent.ahead = {unit: len(tokens) for unit, tokens in sent.told.items()}
        self._send({"do": "add", "job": job})
        for unit in sent.closed:
            self._send({"do": "end", "id": number, "unit": unit})

    def _report(self, message: dict[str, Any]) -> None:
        self.facts = message.get("facts", self.facts)
        if len(message) == 1:
            return
        for number, cached in message["admitted"]:
            if number in self._jobs:
                self._jobs[number].cached = cached
        ended = {(number, unit): stopped for number, unit, stopped in message["ended"]}
        for number, unit, token, *more in message["tokens"]:
            if number not in self._jobs:
                continue
            sent = self._jobs[number]
            told = sent.told.setdefault(unit, [])
            if ahead := sent.ahead.get(unit, 0):
                sent.ahead[unit] = ahead - 1
                if told[len(told) - ahead] != token:
                    self._send({"do": "cancel", "id": number})
                    self._over(number, failed="the worker died, and another one came to other tokens")
                continue
            told.append(token)
            stopped = ended.pop((number, unit), None)
            logprob, top = more or (None, ())
            sent.events.put_nowait(
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
