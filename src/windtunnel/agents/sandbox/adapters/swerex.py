"""SWE-ReX on a sandbox: the runtime and deployment that SWE-agent and others speak to.

A session is a persistent shell of the sandbox; ``execute`` runs beside them. After each action the turn ends,
so an agent that knows nothing of checkpoints gets one where it needs one; ``SandboxRuntime.box`` is there for
those that do. It needs the package ``swe-rex``.

A session has no terminal: programs that want one (``is_interactive_command``) are refused in words, and
``expect`` has no meaning.

Source: the interface of SWE-ReX 1.4 (``swerex.runtime.abstract``, ``swerex.deployment.abstract``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import threading
from pathlib import Path
from subprocess import PIPE, STDOUT, TimeoutExpired
from typing import TYPE_CHECKING, Any

from windtunnel.agents.sandbox.adapters import subprocess as commands
from windtunnel.agents.sandbox.client import Awaitable, put_path
from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError

try:
    from swerex import exceptions as faults
    from swerex.deployment.abstract import AbstractDeployment
    from swerex.runtime import abstract as rex
except ImportError as missing:
    raise ImportError("the SWE-ReX adapter needs the package swe-rex: pip install swe-rex") from missing
if TYPE_CHECKING:
    from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox

LOG = logging.getLogger("windtunnel.sandbox.swerex")


class SandboxRuntime(rex.AbstractRuntime):
    """Runs an agent's actions in a sandbox; each is a turn."""

    def __init__(self, box: AnySandbox) -> None:
        self.box = box
        self._awaited: Any = Awaitable(box, None)
        self.logger = LOG
        self._sessions: set[str] = set()
        self._running: dict[str, threading.Event] = {}

    async def is_alive(self, *, timeout: float | None = None) -> rex.IsAliveResponse:
        """Whether the sandbox runs."""
        try:
            async with asyncio.timeout(timeout):
                info = await self._awaited.info()
        except Exception as error:
            return rex.IsAliveResponse(is_alive=False, message=str(error) or type(error).__name__)
        alive = info.status == "running"
        message = "" if alive else f"sandbox {info.name} is {info.status}"
        return rex.IsAliveResponse(is_alive=alive, message=message)

    async def create_session(self, request: rex.CreateBashSessionRequest) -> rex.CreateBashSessionResponse:
        """Start a persistent shell, and source what is asked for in it."""
        if request.session in self._sessions:
            raise faults.SessionExistsError(f"session {request.session} already exists")
        script = "; ".join(f"source {shlex.quote(path)}" for path in request.startup_source) or "true"
        timeout = max(request.startup_timeout, 10.0)  # a sandbox on a busy host is slow, not broken
        result = await self._act(request.session, script, timeout)
        if result.ended == "timeout":
            raise faults.CommandTimeoutError(f"session {request.session} did not start in {timeout:g} s")
        output = _text(result.stdout + result.stderr)
        self._sessions.add(request.session)
        return rex.CreateBashSessionResponse(output=output)

    async def run_in_session(self, action: rex.BashAction | rex.BashInterruptAction) -> rex.BashObservation:
        """Run a command in a session, or interrupt the one that runs there.

        Raises SessionDoesNotExistError, BashIncorrectSyntaxError, CommandTimeoutError, and
        NonZeroExitCodeError where ``check`` is "raise".
        """
        if action.session not in self._sessions:
            raise faults.SessionDoesNotExistError(f"session {action.session!r} does not exist")
        if action.action_type == "bash_interrupt":
            running = self._running.get(action.session)
            if running is not None:
                running.set()
            return rex.BashObservation(output="", exit_code=0)
        if action.is_interactive_command or action.is_interactive_quit:
            raise UserError(
                "sandbox: a session has no terminal, so interactive programs cannot be used in it"
            )
        # Both outputs in one, in the order of their writing, as a terminal would show them.
        text = f"{{ {action.command}\n}} 2>&1"
        result = await self._act(action.session, text, action.timeout)
        output = _text(result.stdout + result.stderr)
        if result.ended == "timeout":
            raise faults.CommandTimeoutError(
                f"timeout after {action.timeout} seconds while running command {action.command!r}"
            )
        if result.exit_code not in (0, None):
            await self._check_syntax(action.command)
        if action.check == "ignore":
            return rex.BashObservation(output=output, exit_code=None)
        if result.exit_code is None and action.check == "raise":
            raise faults.NoExitCodeError(f"command {action.command!r} ended without a status: {result.ended}")
        if result.exit_code != 0 and action.check == "raise":
            raise _failed(action, result.exit_code, f"Here is the output:\n{output!r}")
        return rex.BashObservation(output=output, exit_code=result.exit_code)

    async def close_session(self, request: rex.CloseBashSessionRequest) -> rex.CloseBashSessionResponse:
        """End the shell of a session."""
        if request.session not in self._sessions:
            raise faults.SessionDoesNotExistError(f"session {request.session!r} does not exist")
        self._sessions.discard(request.session)
        await self._awaited.run("exit", shell=request.session, timeout=10)
        return rex.CloseBashSessionResponse()

    async def execute(self, command: rex.Command) -> rex.CommandResponse:
        """Run a command beside all sessions, as ``subprocess.run`` does."""
        second = STDOUT if command.merge_output_streams else PIPE
        try:
            done = await asyncio.to_thread(
                commands.run, self.box, command.command, shell=command.shell, timeout=command.timeout,
                env=command.env, cwd=command.cwd, stdout=PIPE, stderr=second,
            )  # fmt: skip
        except TimeoutExpired as error:
            sentence = f"Timeout ({command.timeout}s) exceeded while running command"
            raise faults.CommandTimeoutError(sentence) from error
        await self._awaited.end_turn()
        stdout, stderr = _text(done.stdout), _text(done.stderr or b"")
        if command.check and done.returncode != 0:
            raise _failed(command, done.returncode, f"Stdout:\n{stdout!r}\nStderr:\n{stderr!r}")
        return rex.CommandResponse(stdout=stdout, stderr=stderr, exit_code=done.returncode)

    async def read_file(self, request: rex.ReadFileRequest) -> rex.ReadFileResponse:
        """A file as text."""
        data = await self._awaited.get(request.path)
        text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        return rex.ReadFileResponse(content=text.replace("\r\n", "\n").replace("\r", "\n"))

    async def write_file(self, request: rex.WriteFileRequest) -> rex.WriteFileResponse:
        """Write text to a file; folders on the way are made."""
        await self._awaited.put(request.path, request.content.encode())
        await self._awaited.end_turn()
        return rex.WriteFileResponse()

    async def upload(self, request: rex.UploadRequest) -> rex.UploadResponse:
        """Copy a file or a folder of this machine into the sandbox."""
        source = Path(request.source_path)
        if not source.exists():
            raise FileNotFoundError(f"upload: {source} does not exist")
        await asyncio.to_thread(put_path, self.box, source, request.target_path)
        await self._awaited.end_turn()
        return rex.UploadResponse()

    async def close(self) -> rex.CloseResponse:
        """End all sessions; the sandbox runs on."""
        for session in sorted(self._sessions):
            await self.close_session(rex.CloseBashSessionRequest(session=session))
        return rex.CloseResponse()

    async def _act(self, session: str, text: str, timeout: float | None) -> Any:
        """Run ``text`` in the shell of a session; the turn ends with it."""
        cancel = threading.Event()
        self._running[session] = cancel
        try:
            result = await self._awaited.run(text, shell=session, timeout=timeout, cancel=cancel)
        finally:
            self._running.pop(session, None)
        await self._awaited.end_turn()
        return result

    async def _check_syntax(self, command: str) -> None:
        """Raise BashIncorrectSyntaxError where that is why a command failed; nothing of it has run then."""
        line = commands.command_line(["bash", "-n", "-c", command])
        checked = await self._awaited.run(line, shell=commands.SHELL, timeout=30)
        if checked.exit_code == 2 or b"syntax error" in checked.stderr:
            words = _text(checked.stderr)
            raise faults.BashIncorrectSyntaxError(
                f"Error while checking bash command \n{command!r}\n---- Stderr ----\n{words}",
                extra_info={"bash_stdout": _text(checked.stdout), "bash_stderr": words},
            )


class SandboxDeployment(AbstractDeployment):
    """Makes a sandbox when it starts and removes it when it stops; one that was there before stays."""

    def __init__(self, host: AnyHost, spec: SandboxSpec) -> None:
        self.logger = LOG
        self._host, self._spec = host, spec
        self._hooks: list[Any] = []
        self._owned = False
        self._runtime: SandboxRuntime | None = None

    def add_hook(self, hook: Any) -> None:
        self._hooks.append(hook)

    async def is_alive(self, *, timeout: float | None = None) -> rex.IsAliveResponse:
        if self._runtime is None:
            return rex.IsAliveResponse(is_alive=False, message="Runtime is None.")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Find the sandbox, or make it; one whose processes are gone is restored."""
        for hook in self._hooks:
            hook.on_custom_step(f"Starting sandbox {self._spec.name}")
        try:
            box = await asyncio.to_thread(self._find)
        except Exception as error:
            sentence = f"sandbox {self._spec.name} did not start: {error}"
            raise faults.DeploymentStartupError(sentence) from error
        self._runtime = SandboxRuntime(box)

    async def stop(self) -> None:
        if self._runtime is None:
            return
        runtime, self._runtime = self._runtime, None
        # what the last turn's checkpoint lacks matters to nobody where no checkpoint stays
        with contextlib.suppress(*([IncompleteError] if self._owned else [])):
            await runtime.close()
        if self._owned:
            await asyncio.to_thread(self._host.remove, self._spec.name)

    @property
    def runtime(self) -> SandboxRuntime:
        if self._runtime is None:
            raise faults.DeploymentNotStartedError()
        return self._runtime

    def __del__(self) -> None:
        """Nothing: a sandbox is made to outlive the program that made it; ``stop`` removes it."""

    def _find(self) -> AnySandbox:
        info = next((info for info in self._host.boxes() if info.name == self._spec.name), None)
        if info is None:
            self._owned = True
            return self._host.create(self._spec)
        box = self._host.get(info.name)
        if info.status != "running":
            box.restore()
        return box


def _failed(action: rex.BashAction | rex.Command, status: int | None, output: str) -> Exception:
    sentence = f"Command {action.command!r} failed with exit code {status}. {output}"
    failed: Exception = faults.NonZeroExitCodeError(
        f"{action.error_msg}: {sentence}" if action.error_msg else sentence
    )
    return failed


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace").replace("\r\n", "\n")
