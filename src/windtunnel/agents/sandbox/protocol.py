"""What a sandbox and a host of sandboxes are, wherever they run: equal methods, one family of errors.

`Box` and `SandboxHost` are this in the process that holds them, `RemoteBox` and `Client` through a daemon,
on this host or another one; by its HTTP route, other languages call the same methods. A method is declared
here, and nowhere else: arguments and answers travel by these type hints (see `windtunnel.base.calls`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, Self

from windtunnel.agents.sandbox.model import (
    BoxInfo,
    CheckpointManifest,
    Diff,
    FolderEntry,
    GcReport,
    RestoreReport,
    SandboxSpec,
    Saved,
    TurnRecord,
    TurnResult,
)
from windtunnel.base.calls import local


class Closing:
    """``close`` is called at the end of a ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class SandboxHistory:
    """The past of a sandbox: its checkpoints and those it was forked from, oldest first, and its turns."""

    checkpoints: tuple[CheckpointManifest, ...]
    turns: tuple[TurnRecord, ...]


class PendingTurn(Protocol):
    """The checkpoint of a turn, under way."""

    @property
    def done(self) -> bool: ...

    def promote(self) -> None:
        """Somebody waits for it now."""

    def wait(self, timeout: float | None = None) -> TurnRecord:
        """The turn's line of the log once its checkpoint is safe. Raises TimeoutError, IncompleteError where
        it lacks something, SandboxError or another `HostError` when it failed."""
        ...


class AnySandbox(Protocol):
    """One sandbox. Methods raise SandboxDied when its processes are gone, UserError for what cannot be, and
    IncompleteError for what was reached in part, where ``allow_less`` does not allow that."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""

    @property
    def turns(self) -> int: ...

    def info(self) -> BoxInfo: ...

    def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
        stdin: bytes | IO[bytes] | None = None,
    ) -> TurnResult:
        """Run a command (shell text, or arguments) in a persistent shell and wait for its end; ``timeout`` in
        seconds. ``on_output`` gets the output's name and bytes as they come. ``stdin`` is its standard input,
        which is empty without."""

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file of the sandbox, atomically. It counts as a change of the turn."""

    def get(self, path: str) -> bytes:
        """The bytes of a regular file of the sandbox; links are followed inside of it only."""

    def get_to(self, path: str, out: IO[bytes]) -> None:
        """Stream a file of the sandbox into ``out``."""

    def listdir(self, path: str) -> list[FolderEntry]: ...

    def port(self, port: int) -> str:
        """The URL of this host's loopback that leads to a TCP port inside; a restore leaves it as it is."""

    @local
    @contextlib.contextmanager
    def turn(self, request: str = "") -> Iterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        self.end_turn(request)

    def end_turn(self, request: str = "", *, urgent: bool = False) -> PendingTurn:
        """End the turn: decide what it needs, and start that. A turn that needs nothing is done at once."""

    def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint under way, if any, is safe. Raises TimeoutError, or what it failed with."""

    def checkpoint(
        self, label: str = "", *, full: bool = False, pin: bool = False, allow_less: bool = False
    ) -> CheckpointManifest: ...

    def restore(self, checkpoint: str = "", *, allow_less: bool = False) -> RestoreReport: ...

    def rollback(self, checkpoint: str, *, allow_less: bool = False) -> RestoreReport: ...

    def log(self) -> SandboxHistory: ...

    def diff(self, older: str, newer: str = "") -> Diff:
        """What changed from checkpoint ``older`` to ``newer`` (empty: to the sandbox as it is now)."""

    def stop(self) -> None:
        """Kill all its processes. Files and checkpoints stay; ``restore`` brings it back."""


class AnyHost(Protocol):
    """The sandboxes of one host."""

    def create(self, spec: SandboxSpec) -> AnySandbox:
        """A new running sandbox."""

    def get(self, name: str) -> AnySandbox:
        """The sandbox of that name; UserError where there is none."""

    def boxes(self) -> list[BoxInfo]: ...

    def fork(
        self, checkpoint: str, count: int = 1, *, name: str = "", allow_less: bool = False
    ) -> Sequence[AnySandbox]:
        """``count`` new sandboxes from a checkpoint's id, its beginning, or a sandbox's name. ``name``: of a
        single one, or what their names NAME-1, NAME-2, … begin with."""

    def remove(self, name: str) -> None: ...

    def import_(self, url: str, name: str, *, key_file: str = "", allow_less: bool = False) -> AnySandbox: ...

    def export(self, checkpoint: str, url: str, *, allow_less: bool = False) -> CheckpointManifest: ...

    def notice(self, seconds: float) -> dict[str, Saved]:
        """The host will be taken in ``seconds``: checkpoint every sandbox that runs. What lacks is told."""

    def gc(self, *, dry_run: bool = False) -> GcReport: ...

    @local
    def close(self) -> None: ...


class AnyDaemon(Protocol):
    """The process that holds the sandboxes of a home."""

    def down(self) -> None:
        """End the daemon; the sandboxes run on."""
