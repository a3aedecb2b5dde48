"""Every request to the daemon, once for the blocking and the asynchronous client: what is sent, in which
order, and how the answer is read. Nothing else knows a path or a field."""

from __future__ import annotations

import io
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any, Generic, TypeVar
from urllib.parse import quote

from windtunnel.agents.sandbox import model
from windtunnel.agents.sandbox.client import wire
from windtunnel.agents.sandbox.client.launch import Address
from windtunnel.agents.sandbox.client.links import Call, L, Linked, Steps, request
from windtunnel.agents.sandbox.client.wire import reads
from windtunnel.agents.sandbox.model import Facility, Manifest, SandboxSpec, Turn, TurnResult
from windtunnel.agents.sandbox.protocol import Log

BoxT = TypeVar("BoxT")
PendingT = TypeVar("PendingT")
OnOutput = Callable[[str, bytes], None]
PIECE = 1 << 20
LONGEST_ASK = 20.0
"""Seconds that one request waits for a checkpoint; then it is asked again."""


def _nothing(answer: Any) -> None:
    return None


def of_box(name: str, *rest: str) -> str:
    """The path of a sandbox, or of something of it."""
    return "/".join(("/v1/boxes", quote(name, safe=""), *rest))


class HostCalls(Linked[L], Generic[L, BoxT]):
    """The sandboxes of one host, through its daemon. ``_box`` makes what is returned for a sandbox."""

    _box: Callable[[Any, str], BoxT]

    def __init__(self, link: L) -> None:
        self._link = link

    @property
    def place(self) -> Address:
        return self._link.place

    def _made(self, answer: Any) -> BoxT:
        return self._box(self, wire.read(model.BoxInfo, answer).name)

    @request
    def create(self, spec: SandboxSpec) -> Call[BoxT]:
        """A new running sandbox."""
        return Call("POST", "/v1/boxes", self._made, asdict(spec))

    @request
    def get(self, name: str) -> Call[BoxT]:
        """The sandbox of that name; UserError where there is none."""
        return Call("GET", of_box(name), self._made)

    @request
    def boxes(self) -> Call[list[model.BoxInfo]]:
        return Call("GET", "/v1/boxes", reads(list[model.BoxInfo]))

    @request
    def fork(
        self,
        checkpoint: str,
        count: int = 1,
        *,
        names: Sequence[str] | None = None,
        allow_less: bool = False,
    ) -> Call[list[BoxT]]:
        """``count`` new sandboxes from a checkpoint's id, its beginning, or a sandbox's name."""
        chosen = None if names is None else list(names)
        body = {"checkpoint": checkpoint, "count": count, "names": chosen}
        body["allow_less"] = allow_less
        return Call("POST", "/v1/fork", lambda answer: [self._made(one) for one in answer], body)

    @request
    def remove(self, name: str) -> Call[None]:
        return Call("DELETE", of_box(name), _nothing)

    @request
    def import_(self, url: str, name: str, *, key_file: str = "", allow_less: bool = False) -> Call[BoxT]:
        body = {"url": url, "name": name, "key_file": key_file, "allow_less": allow_less}
        return Call("POST", "/v1/import", self._made, body)

    @request
    def export(self, checkpoint: str, url: str, *, allow_less: bool = False) -> Call[Manifest]:
        body = {"checkpoint": checkpoint, "url": url, "allow_less": allow_less}
        return Call("POST", "/v1/export", reads(Manifest), body)

    @request
    def notice(self, seconds: float) -> Call[dict[str, model.Saved]]:
        """The host will be taken in ``seconds``: checkpoint every sandbox that runs."""
        return Call("POST", "/v1/notice", reads(dict[str, model.Saved]), {"seconds": seconds})

    @request
    def gc(self, *, dry_run: bool = False) -> Call[model.GcReport]:
        return Call("POST", "/v1/gc", reads(model.GcReport), {"dry_run": dry_run})

    @request
    def verify(self, what: str = "") -> Call[model.VerifyReport]:
        """Read a checkpoint, all of a sandbox, or all there are from the disk, and check every byte."""
        return Call("POST", "/v1/verify", reads(model.VerifyReport), {"what": what})

    @request
    def doctor(self) -> Call[list[Facility]]:
        return Call("GET", "/v1/doctor", reads(list[Facility]))

    @request
    def health(self) -> Call[wire.Health]:
        return HEALTH


HEALTH = Call("GET", "/v1/health", reads(wire.Health))
DOWN = Call("POST", "/v1/down", _nothing)
EVENTS = Call("GET", "/v1/events", _nothing)


class BoxCalls(Linked[L], Generic[L, PendingT]):
    """One sandbox, through the daemon. ``_pending`` makes what is returned for a checkpoint under way."""

    _pending: Callable[[L, str, wire.TurnAnswer], PendingT]

    def __init__(self, client: HostCalls[L, Any], name: str) -> None:
        self.client: HostCalls[L, Any] = client
        self.name = name
        self._link = client._link

    def _path(self, *rest: str) -> str:
        return of_box(self.name, *rest)

    @request
    def info(self) -> Call[model.BoxInfo]:
        return Call("GET", self._path(), reads(model.BoxInfo))

    def _spec(self) -> Call[SandboxSpec]:
        return Call("GET", self._path("spec"), reads(SandboxSpec))

    @request
    def shells(self) -> Call[list[str]]:
        """Names of its persistent shells."""
        return Call("GET", self._path("shells"), list)

    def _command(
        self,
        command: str | Sequence[str],
        shell: str,
        timeout: float | None,
        on_output: OnOutput | None,
        cancel: threading.Event | None = None,
        **turn: object,
    ) -> Call[tuple[TurnResult, dict[str, Any]]]:
        """A command; with the end of its ``turn``, where that is asked for."""
        execution = uuid.uuid4().hex
        collector = wire.Collector(on_output)
        stopping = Call("POST", f"/v1/executions/{execution}/cancel", _nothing)
        text = command if isinstance(command, str) else shlex.join(command)
        return Call(
            "POST",
            self._path("exec"),
            lambda _: (collector.complete(), collector.turn),
            {"command": text, "id": execution, "shell": shell, "timeout": timeout, **turn},
            take=collector.take,
            cancel=None if cancel is None else (cancel, stopping),
        )

    @request
    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> Steps[None]:
        """Write a file of the sandbox."""
        yield from HEALTH  # a body that is a stream cannot be sent twice, so the daemon must be there
        query = {"path": path, "mode": f"{mode:o}"}
        yield from Call("PUT", self._path("files"), _nothing, query=query, content=_pieces(data))

    @request
    def get_to(self, path: str, out: IO[bytes]) -> Call[None]:
        """Stream a file of the sandbox into ``out``."""
        return Call("GET", self._path("files"), _nothing, query={"path": path}, take=out.write)

    @request
    def get(self, path: str) -> Call[bytes]:
        """The bytes of a file of the sandbox."""
        out = io.BytesIO()
        return Call(
            "GET", self._path("files"), lambda _: out.getvalue(), query={"path": path}, take=out.write
        )

    @request
    def listdir(self, path: str) -> Call[list[model.Entry]]:
        return Call("GET", self._path("entries"), reads(list[model.Entry]), query={"path": path})

    @request
    def end_turn(self, request: str = "", *, urgent: bool = False) -> Call[PendingT]:
        """End the turn: it is classified, and its checkpoint starts."""
        body = {"request": request, "urgent": urgent}
        return Call("POST", self._path("turns", "end"), self._started, body)

    def _started(self, answer: Any) -> PendingT:
        return self._pending(self._link, self.name, wire.read(wire.TurnAnswer, answer))

    @request
    def wait(self, timeout: float | None = None) -> Call[None]:
        """Until the checkpoint under way, if any, is safe. Raises TimeoutError, or what it failed with."""
        query = {} if timeout is None else {"timeout": timeout}
        return Call("POST", self._path("turns", "begin"), _nothing, query=query)

    @request
    def checkpoint(
        self, label: str = "", *, full: bool = False, pin: bool = False, allow_less: bool = False
    ) -> Call[Manifest]:
        body = {"label": label, "full": full, "pin": pin, "allow_less": allow_less}
        return Call("POST", self._path("checkpoint"), reads(Manifest), body)

    @request
    def restore(self, checkpoint: str = "", *, allow_less: bool = False) -> Call[model.RestoreReport]:
        body = {"checkpoint": checkpoint, "allow_less": allow_less}
        return Call("POST", self._path("restore"), reads(model.RestoreReport), body)

    @request
    def rollback(self, checkpoint: str, *, allow_less: bool = False) -> Call[model.RestoreReport]:
        body = {"checkpoint": checkpoint, "allow_less": allow_less}
        return Call("POST", self._path("rollback"), reads(model.RestoreReport), body)

    @request
    def log(self) -> Call[Log]:
        return Call("GET", self._path("log"), reads(Log))

    @request
    def diff(self, older: str, newer: str = "") -> Call[model.Diff]:
        return Call("GET", self._path("diff"), reads(model.Diff), query={"older": older, "newer": newer})

    @request
    def stop(self) -> Call[None]:
        """Kill all its processes. Files and checkpoints stay; ``restore`` brings it back."""
        return Call("POST", self._path("stop"), _nothing)

    @request
    def remove(self) -> Call[None]:
        return Call("DELETE", self._path(), _nothing)


class PendingCalls(Linked[L]):
    """The checkpoint of a turn, under way at the daemon."""

    def __init__(self, link: L, box: str, answer: wire.TurnAnswer) -> None:
        self._link, self.box, self._answer = link, box, answer

    def _ask(self, timeout: float = 0.0, promote: bool = False) -> Steps[bool]:
        """Whether it is done, after at most ``timeout`` seconds. Raises SandboxError when it failed."""
        if not self._answer.done:
            query = {"timeout": timeout, "promote": promote}
            path = of_box(self.box, "turns", self._answer.ticket)
            self._answer = yield from Call("GET", path, reads(wire.TurnAnswer), query=query)
        return self._answer.done

    @request
    def promote(self) -> Steps[None]:
        """Somebody waits for it now."""
        yield from self._ask(promote=True)

    @request
    def wait(self, timeout: float | None = None) -> Steps[Turn]:
        """The turn's line of the log once its checkpoint is safe.

        Raises TimeoutError when it is not in time, LessError where it lacks something, and SandboxError when
        it failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        left = LONGEST_ASK
        while True:
            if deadline is not None:
                left = min(LONGEST_ASK, max(0.0, deadline - time.monotonic()))
            if (yield from self._ask(left)):
                assert self._answer.turn is not None
                return self._answer.turn
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the checkpoint of sandbox {self.box} is not done after {timeout} s")


def _pieces(source: bytes | IO[bytes]) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    while piece := source.read(PIECE):
        yield piece
