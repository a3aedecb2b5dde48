"""``RemoteBox`` is a ``Box`` elsewhere: one sandbox, through the daemon of its host."""

from __future__ import annotations

import contextlib
import io
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

from windtunnel.agents.sandbox import views
from windtunnel.agents.sandbox.client import calls, wire
from windtunnel.agents.sandbox.model import Manifest, SandboxSpec, Turn, TurnResult

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client.blocking import Client

OnOutput = Callable[[str, bytes], None]


class RemotePending:
    """The checkpoint of a turn, under way at the daemon."""

    def __init__(self, client: Client, box: str, answer: wire.TurnAnswer) -> None:
        self._client = client
        self.box = box
        self._answer = answer

    @property
    def done(self) -> bool:
        if not self._answer.done:
            self._ask(0.0)
        return self._answer.done

    def promote(self) -> None:
        """Somebody waits for it now."""
        if not self._answer.done:
            self._ask(0.0, promote=True)

    def wait(self, timeout: float | None = None) -> Turn:
        """The turn's line of the log once its checkpoint is safe.

        Raises TimeoutError when it is not in time, and SandboxFault when the checkpoint failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._answer.done:
            left = 20.0 if deadline is None else min(20.0, max(0.0, deadline - time.monotonic()))
            self._ask(left)
            if not self._answer.done and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the checkpoint of sandbox {self.box} is not done after {timeout} s")
        assert self._answer.turn is not None
        return self._answer.turn

    def _ask(self, timeout: float, promote: bool = False) -> None:
        ask = calls.pending(self.box, self._answer.ticket, timeout=timeout, promote=promote)
        self._answer = self._client.call(ask)


class RemoteBox:
    """One sandbox, through the daemon."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name

    def info(self) -> views.BoxInfo:
        return self.client.call(calls.info(self.name))

    @property
    def spec(self) -> SandboxSpec:
        return self.client.call(calls.spec(self.name))

    @property
    def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return self.info().tip

    @property
    def turns(self) -> int:
        return self.info().turns

    def shells(self) -> list[str]:
        """Names of its persistent shells."""
        return self.client.call(calls.shells(self.name))

    def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
    ) -> TurnResult:
        """Run a command (shell text, or arguments) in a persistent shell and wait for its end.

        With ``on_output`` the output is passed on as it comes, and the result holds only the end of it.
        """
        return self._execute(command, shell, timeout, cancel, on_output, turn=False, request="")[0]

    def run_turn(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
        request: str = "",
    ) -> tuple[TurnResult, RemotePending | None, str]:
        """``run`` and ``end_turn`` in one request: the result, the checkpoint under way, and, where the turn
        could not be ended, why."""
        result, turn = self._execute(command, shell, timeout, cancel, on_output, turn=True, request=request)
        if "ticket" not in turn:
            return result, None, str(turn.get("error", ""))
        return result, RemotePending(self.client, self.name, wire.read(wire.TurnAnswer, turn)), ""

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file of the sandbox."""
        query = {"path": path, "mode": f"{mode:o}"}
        self.client.upload(calls.of_box(self.name, "files"), query, data)

    def get_to(self, path: str, out: IO[bytes]) -> None:
        """Stream a file of the sandbox into ``out``."""
        self.client.download(calls.of_box(self.name, "files"), {"path": path}, out)

    def get(self, path: str) -> bytes:
        """The bytes of a file of the sandbox."""

        out = io.BytesIO()
        self.get_to(path, out)
        return out.getvalue()

    def listdir(self, path: str) -> list[views.Entry]:
        return self.client.call(calls.listdir(self.name, path))

    @contextlib.contextmanager
    def turn(self, request: str = "") -> Iterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        self.end_turn(request)

    def end_turn(self, request: str = "", *, urgent: bool = False) -> RemotePending:
        answer = self.client.call(calls.end_turn(self.name, request, urgent))
        return RemotePending(self.client, self.name, answer)

    def wait(self) -> None:
        """Until the checkpoint under way, if any, is safe."""
        self.client.call(calls.settle(self.name))

    def checkpoint(self, label: str = "", *, full: bool = False, pin: bool = False) -> Manifest:
        return self.client.call(calls.checkpoint(self.name, label, full, pin))

    def restore(self, checkpoint: str = "", *, lazy: bool = False) -> views.RestoreReport:
        return self.client.call(calls.restore(self.name, checkpoint, lazy))

    def rollback(self, checkpoint: str, *, lazy: bool = False) -> views.RestoreReport:
        return self.client.call(calls.rollback(self.name, checkpoint, lazy))

    def log(self) -> wire.Log:
        return self.client.call(calls.log(self.name))

    def diff(self, older: str, newer: str = "") -> views.Diff:
        return self.client.call(calls.diff(self.name, older, newer))

    def stop(self) -> None:
        self.client.call(calls.stop(self.name))

    def remove(self) -> None:
        self.client.remove(self.name)

    def _execute(
        self,
        command: str | Sequence[str],
        shell: str,
        timeout: float | None,
        cancel: threading.Event | None,
        on_output: OnOutput | None,
        *,
        turn: bool,
        request: str,
    ) -> tuple[TurnResult, dict[str, object]]:
        execution = uuid.uuid4().hex
        body = calls.execute(
            command, execution=execution, shell=shell, timeout=timeout, turn=turn, request=request
        )
        return self.client.execute(calls.of_box(self.name, "exec"), body, cancel, on_output)
