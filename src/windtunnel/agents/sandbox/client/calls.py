"""Every request to the daemon, as plain data: what is sent, and how its answer is read.

Both clients, blocking and asynchronous, send these; neither knows a path or a field.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from windtunnel.agents.sandbox import views
from windtunnel.agents.sandbox.client import wire
from windtunnel.agents.sandbox.model import Facility, Manifest, SandboxSpec
from windtunnel.agents.sandbox.protocol import Log

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request. ``read`` makes the answer's JSON into what the caller gets."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: dict[str, Any] | None = None
    query: dict[str, Any] = field(default_factory=dict)


def _kind(kind: type[T]) -> Callable[[Any], T]:
    return lambda answer: wire.read(kind, answer)


def _kinds(kind: type[T]) -> Callable[[Any], list[T]]:
    return lambda answer: [wire.read(kind, one) for one in answer]


def _nothing(answer: Any) -> None:
    return None


def of_box(name: str, *rest: str) -> str:
    """The path of a sandbox, or of something of it."""
    return "/".join(("/v1/boxes", quote(name, safe=""), *rest))


def health() -> Call[wire.Health]:
    return Call("GET", "/v1/health", _kind(wire.Health))


def down() -> Call[None]:
    return Call("POST", "/v1/down", _nothing)


def doctor() -> Call[list[Facility]]:
    return Call("GET", "/v1/doctor", _kinds(Facility))


def create(spec: SandboxSpec) -> Call[views.BoxInfo]:
    return Call("POST", "/v1/boxes", _kind(views.BoxInfo), asdict(spec))


def boxes() -> Call[list[views.BoxInfo]]:
    return Call("GET", "/v1/boxes", _kinds(views.BoxInfo))


def info(name: str) -> Call[views.BoxInfo]:
    return Call("GET", of_box(name), _kind(views.BoxInfo))


def spec(name: str) -> Call[SandboxSpec]:
    return Call("GET", of_box(name, "spec"), _kind(SandboxSpec))


def remove(name: str) -> Call[None]:
    return Call("DELETE", of_box(name), _nothing)


def stop(name: str) -> Call[None]:
    return Call("POST", of_box(name, "stop"), _nothing)


def shells(name: str) -> Call[list[str]]:
    return Call("GET", of_box(name, "shells"), list)


def execute(
    command: str | Sequence[str],
    *,
    execution: str,
    shell: str,
    timeout: float | None,
    turn: bool,
    request: str,
) -> dict[str, Any]:
    """Body of a command's request; its answer is a stream and read by ``wire.Collector``."""
    return {
        "command": command if isinstance(command, str) else shlex.join(command),
        "id": execution,
        "shell": shell,
        "timeout": timeout,
        "turn": turn,
        "request": request,
        "stream": True,
    }


def cancel(execution: str) -> Call[None]:
    return Call("POST", f"/v1/executions/{execution}/cancel", _nothing)


def end_turn(name: str, request: str, urgent: bool) -> Call[wire.TurnAnswer]:
    body = {"request": request, "urgent": urgent}
    return Call("POST", of_box(name, "turns", "end"), _kind(wire.TurnAnswer), body)


def pending(name: str, ticket: str, *, timeout: float, promote: bool) -> Call[wire.TurnAnswer]:
    query = {"timeout": timeout, "promote": promote}
    return Call("GET", of_box(name, "turns", ticket), _kind(wire.TurnAnswer), query=query)


def settle(name: str, timeout: float | None) -> Call[None]:
    query = {} if timeout is None else {"timeout": timeout}
    return Call("POST", of_box(name, "turns", "begin"), _nothing, query=query)


def checkpoint(name: str, label: str, full: bool, pin: bool) -> Call[Manifest]:
    body = {"label": label, "full": full, "pin": pin}
    return Call("POST", of_box(name, "checkpoint"), _kind(Manifest), body)


def restore(name: str, checkpoint: str, lazy: bool) -> Call[views.RestoreReport]:
    body = {"checkpoint": checkpoint, "lazy": lazy}
    return Call("POST", of_box(name, "restore"), _kind(views.RestoreReport), body)


def rollback(name: str, checkpoint: str, lazy: bool) -> Call[views.RestoreReport]:
    body = {"checkpoint": checkpoint, "lazy": lazy}
    return Call("POST", of_box(name, "rollback"), _kind(views.RestoreReport), body)


def fork(checkpoint: str, count: int, names: Sequence[str] | None, lazy: bool) -> Call[list[views.BoxInfo]]:
    body = {
        "checkpoint": checkpoint,
        "count": count,
        "names": list(names) if names is not None else None,
        "lazy": lazy,
    }
    return Call("POST", "/v1/fork", _kinds(views.BoxInfo), body)


def log(name: str) -> Call[Log]:
    return Call("GET", of_box(name, "log"), _kind(Log))


def diff(name: str, older: str, newer: str) -> Call[views.Diff]:
    return Call("GET", of_box(name, "diff"), _kind(views.Diff), query={"older": older, "newer": newer})


def gc(dry_run: bool) -> Call[views.GcReport]:
    return Call("POST", "/v1/gc", _kind(views.GcReport), {"dry_run": dry_run})


def export(checkpoint: str, url: str) -> Call[Manifest]:
    return Call("POST", "/v1/export", _kind(Manifest), {"checkpoint": checkpoint, "url": url})


def import_(url: str, name: str) -> Call[views.BoxInfo]:
    return Call("POST", "/v1/import", _kind(views.BoxInfo), {"url": url, "name": name})


def notice(seconds: float) -> Call[dict[str, str]]:
    return Call("POST", "/v1/notice", dict, {"seconds": seconds})


def listdir(name: str, path: str) -> Call[list[views.Entry]]:
    return Call("GET", of_box(name, "entries"), _kinds(views.Entry), query={"path": path})
