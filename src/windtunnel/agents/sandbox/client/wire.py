"""What the daemon and its clients say to each other: answers as dataclasses, outputs as lines of JSON.

Answers travel as JSON and come back as the dataclasses of ``model`` and of this file. A command's output is a
stream of lines, each a JSON object: ``{"stdout": text}`` where the bytes are UTF-8, else
``{"stdout_base64": …}``, the same for stderr, and at last ``{"result": …}`` or ``{"error": …}``. So the bytes
are exact, and a person can read the stream.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from windtunnel.agents.sandbox.errors import LessError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import Lack, Manifest, RestoreReport, Turn, TurnResult
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain

T = TypeVar("T")
TAIL = 64 * 2**10
"""Bytes of each output that a result holds where the output was passed on while the command ran."""


@dataclass(frozen=True)
class TurnAnswer:
    """The end of a turn. ``ticket`` names its checkpoint while that is under way; ``turn`` is its line of the
    log once ``done``."""

    ticket: str
    done: bool
    turn: Turn | None = None


@dataclass(frozen=True)
class Health:
    """A daemon that answers."""

    pid: int
    home: str
    version: str


STATUS = {
    "user": 400,
    "denied": 401,
    "unknown": 404,
    "conflict": 409,
    "died": 410,
    "less": 417,
    "late": 504,
    "fault": 500,
    "full": 507,
}
"""Kinds of errors, and the HTTP status that each has."""


@dataclass(frozen=True)
class Lacking:
    """What an error of kind ``less`` says beside its sentence."""

    lacks: tuple[Lack, ...]
    manifest: Manifest | None = None
    report: RestoreReport | None = None


def raised(answer: Any, status: int = 500) -> Exception:
    """The exception for an error that the daemon answered with."""
    known = answer if isinstance(answer, dict) else {}
    sentence = str(known.get("error") or f"the daemon answered with HTTP status {status}")
    kind = known.get("kind", "user" if status == 422 else "fault")
    if kind in ("user", "denied", "unknown", "conflict"):
        return UserError(sentence)
    if kind == "late":
        return TimeoutError(sentence)
    if kind == "less":
        found = read(Lacking, known)
        return LessError(sentence, found.lacks, manifest=found.manifest, report=found.report)
    return SandboxDied(sentence) if kind == "died" else SandboxError(sentence)


def read(kind: type[T], plain: Any) -> T:
    """``plain`` JSON data as a ``kind``; what a newer daemon adds is left out.

    Raises:
        SandboxError: the daemon speaks otherwise, an older one for example.
    """
    try:
        return from_plain(kind, plain, foreign=True)
    except (TypeError, ValueError, KeyError) as error:
        raise SandboxError(f"sandbox: the daemon's answer cannot be read: {error}") from error


def told_less(error: LessError) -> dict[str, Any]:
    """The fields of `Lacking` as JSON data."""
    plain: dict[str, Any] = to_plain(Lacking(error.lacks, error.manifest, error.report))
    return plain


def reads(kind: type[T]) -> Callable[[Any], T]:
    """``read`` for one kind."""
    return lambda plain: read(kind, plain)


def output_line(stream: str, data: bytes) -> bytes:
    """One piece of output as a line."""
    try:
        return json_line({stream: data.decode()})
    except UnicodeDecodeError:
        return json_line({f"{stream}_base64": base64.b64encode(data).decode()})


def json_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def line(text: bytes) -> Any:
    """The value of one line; raises the error that it tells."""
    value = json.loads(text)
    if "error" in value:
        raise raised(value)
    return value


def result_line(result: TurnResult, sent: dict[str, int], turn: dict[str, Any] | None) -> bytes:
    """The last line: how the command ended, how many bytes were sent, and the end of its turn."""
    ended = {
        "exit_code": result.exit_code,
        "seconds": result.seconds,
        "ended": result.ended,
        "note": result.note,
        "stdout_bytes": sent["stdout"],
        "stderr_bytes": sent["stderr"],
    }
    return json_line({"result": ended, "turn": turn})


class Lines:
    """Cuts a stream into lines, by the line feed alone: text inside of a line may hold other separators."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece of the stream; the lines that it ends."""
        self._rest += data
        if b"\n" not in data:
            return []
        *whole, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [line for line in whole if line]


class Collector:
    """Puts a command's stream together again. With ``on_output`` the output is passed on as it comes, and
    only the end of it is kept."""

    def __init__(self, on_output: Callable[[str, bytes], None] | None = None) -> None:
        self.outputs = {"stdout": bytearray(), "stderr": bytearray()}
        self.counts = {"stdout": 0, "stderr": 0}
        self._lines, self._on_output = Lines(), on_output
        self.result: TurnResult | None = None
        self.turn: dict[str, Any] = {}

    def take(self, data: bytes) -> None:
        """Take a piece of the stream. Raises what the daemon failed with."""
        for text in self._lines.feed(data):
            value = line(text)
            if "result" in value:
                self._end(value["result"])
                self.turn = value.get("turn") or {}
                continue
            ((key, part),) = value.items()
            output = base64.b64decode(part) if key.endswith("_base64") else part.encode()
            self._output(key.removesuffix("_base64"), output)

    def _output(self, stream: str, data: bytes) -> None:
        kept = self.outputs[stream]
        kept += data
        self.counts[stream] += len(data)
        if self._on_output is not None:
            if len(kept) > 2 * TAIL:
                del kept[:-TAIL]
            self._on_output(stream, data)

    def complete(self) -> TurnResult:
        """The result; SandboxError when the stream ended before it came."""
        if self.result is None:
            raise SandboxError("the daemon ended before the command did; what the command did is not known")
        return self.result

    def _end(self, ended: dict[str, Any]) -> None:
        if self.counts != {"stdout": ended.pop("stdout_bytes"), "stderr": ended.pop("stderr_bytes")}:
            raise SandboxError("part of the command's output was lost between the daemon and here")
        first = None if self._on_output is None else -TAIL
        stdout, stderr = (bytes(kept[first:]) for kept in self.outputs.values())
        passed_on = self._on_output is not None
        tails = tuple(name for name, count in self.counts.items() if passed_on and count > TAIL)
        self.result = TurnResult(stdout=stdout, stderr=stderr, tails=tails, **ended)
