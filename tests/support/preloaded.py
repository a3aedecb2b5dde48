"""Processes that begin with torch imported: forked from a server that has it, in place of fresh interpreters.

Importing torch and what a training script uses of it costs seconds of CPU in every process; a fork costs
milliseconds. One server for each list of modules lives as long as the process of pytest that asked for it.
What it forks sees its own arguments, environment, folder and streams, and ends as a script does that leaves
no group of processes open: by `os._exit`, after its exit handlers.

A forked process is not the child of who asked, and it dies with the connection of who asked. Tests of how
processes begin or end take real ones.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import pickle
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from windtunnel.linux.forkserver import finish, request_fd
from windtunnel.training.elastic.spec import PRELOAD

TRAINING = (
    *PRELOAD,
    "support.kernels",
    "support.quick",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "windtunnel.api",
    "windtunnel.cli.emulate",
    "windtunnel.cli.main",
    "windtunnel.cli.train",
    "windtunnel.report.terminal",
    "windtunnel.training.cleanup",
    "windtunnel.training.elastic.live.agent.config",
    "windtunnel.training.emulate.run",
    "windtunnel.training.gradsync.live.script",
    "windtunnel.training.pipelines.live.trainer",
    "windtunnel.training.session",
)
"""What training scripts import, and the ranks, the launcher and the command line of ours."""
SANDBOX = (
    "support.small_image",
    "windtunnel.agents.sandbox.client",
    "windtunnel.agents.sandbox.daemon.server",
    "windtunnel.agents.sandbox.host",
    "windtunnel.cli.main",
)
"""What hosts of sandboxes, daemons and their clients import."""
STARTING = 200.0  # seconds that a server may take for its imports
PACKET = 1 << 12


# -- for who asks ------------------------------------------------------------------------------------------


class Process:
    """One that was forked: what tests and callers use of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        modules: tuple[str, ...] = TRAINING,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """``command``: ``-m module``, ``-c code`` or a script, and its arguments, without the interpreter."""
        self.args = list(map(str, command))
        self.returncode: int | None = None
        theirs: list[int] = []
        streams: list[Any] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            mine = None
            if given == subprocess.PIPE:
                read, write = os.pipe()
                own, other, mode = (write, read, "w") if number == 0 else (read, write, "r")
                mine = os.fdopen(own, mode if text else mode + "b")
            elif given == subprocess.DEVNULL:
                other = os.open(os.devnull, os.O_RDWR)
            elif given == subprocess.STDOUT:
                other = os.dup(theirs[1])
            elif given is None or isinstance(given, int):
                other = os.dup(number if given is None else given)
            else:
                other = os.dup(given.fileno())
            theirs.append(other)
            streams.append(mine)
        theirs += map(os.dup, pass_fds)
        self.stdin, self.stdout, self.stderr = streams
        wanted = {
            "command": self.args,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "session": start_new_session,
            "fds": [0, 1, 2, *pass_fds],
        }
        self._link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = request_fd(wanted)
        socket.send_fds(server(modules), [b"start"], [far.fileno(), request, *theirs])
        for fd in (request, *theirs):
            os.close(fd)
        far.close()
        self._link.settimeout(STARTING)
        self.pid = int(self._answer()["pid"])

    def _answer(self) -> dict[str, int]:
        packet = self._link.recv(PACKET)
        assert packet, "the server of preloaded processes is gone"
        answer: dict[str, int] = json.loads(packet)
        return answer

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._link.fileno()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._link, selectors.EVENT_READ)
                if not waiting.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._answer()["code"]
            self._link.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # its parent may have seen its end before we are told of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Subprocess:
    """In place of the module `subprocess` where ``python -m module`` is to be forked from a server."""

    def __init__(self, module: str, preloaded: tuple[str, ...] = TRAINING) -> None:
        self._module, self._preloaded = module, preloaded

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: list[str], **options: Any) -> Any:
        if command[:3] != [sys.executable, "-m", self._module]:
            return subprocess.Popen(command, **options)
        return Process(command[1:], modules=self._preloaded, **options)


def call(
    function: Callable[..., Any], *arguments: Any, modules: tuple[str, ...] = TRAINING, **options: Any
) -> Process:
    """A process that calls ``function``, which it imports by name, and ends; ``options``: of `Process`.

    Not by the fork server of `multiprocessing`: a process has one, and whoever started it first chose what
    it has imported.
    """
    given = base64.b64encode(pickle.dumps((function, arguments))).decode()
    code = (
        "import base64, pickle, sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        f"function, arguments = pickle.loads(base64.b64decode({given!r}))\n"
        "function(*arguments)\n"
    )
    return Process(["-c", code], modules=modules, **options)


def run(
    command: Sequence[str | Path],
    *,
    modules: tuple[str, ...] = TRAINING,
    input: bytes = b"",
    timeout: float = 120.0,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """As `subprocess.run` with ``capture_output``; what lasts longer than ``timeout`` seconds is killed."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input)
        given.seek(0)
        process = Process(command, modules=modules, stdin=given, stdout=out, stderr=err, **options)
        try:
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(process.args, status, out.read(), err.read())


def adopt(modules: tuple[str, ...], fd: int) -> None:
    """The server that has imported ``modules`` is that at ``fd``, lent to this process by another one."""
    os.set_inheritable(fd, False)
    _servers[modules] = socket.socket(fileno=fd)


_servers: dict[tuple[str, ...], socket.socket] = {}


def server(modules: tuple[str, ...]) -> socket.socket:
    """The connection to the server that has imported ``modules``; started at the first call."""
    if modules not in _servers:
        _servers[modules] = _started(modules)
    return _servers[modules]


def _started(modules: tuple[str, ...]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env["ROOM"] = "x" * (1 << 16)  # for the environments of those that are forked
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "support.preloaded", str(theirs.fileno()), ",".join(modules)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()  # its time counts as that of the tests, too

    atexit.register(end)
    return ours


# -- the server --------------------------------------------------------------------------------------------


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    # What is there now stays in every child: none need look at it again when it collects garbage.
    gc.collect()
    gc.freeze()
    task = _serve(control)
    if task is not None:
        task()


def _serve(control: socket.socket) -> Callable[[], None] | None:
    """Forks what is asked for, until who asks is gone. In a child: what it is to do."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, who asked)
    while True:
        for key, _ in selector.select():
            fd = key.fd
            if fd not in selector.get_map():  # gone with one that was ready at the same time
                continue
            if fd in running:  # it ended
                pid, asker = running.pop(fd)
                selector.unregister(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if asker.fileno() in selector.get_map():
                    selector.unregister(asker)
                with contextlib.suppress(OSError):
                    asker.send(json.dumps({"code": code}).encode())
                asker.close()
            elif fd == control.fileno():
                packet, fds, _flags, _address = socket.recv_fds(control, PACKET, 16)
                if not packet:
                    for pid, _asker in running.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if pid == 0:
                    # Each by whoever holds it: a number that is closed behind an object's back, and taken
                    # again, is closed once more when that object goes.
                    selector.close()
                    control.close()
                    for pidfd, (_pid, asker) in running.items():
                        os.close(pidfd)
                        asker.close()
                    return functools.partial(_child, fds)
                asker = socket.socket(fileno=fds[0])
                for descriptor in fds[1:]:
                    os.close(descriptor)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = (pid, asker)
                selector.register(pidfd, selectors.EVENT_READ)
                selector.register(asker, selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    asker.send(json.dumps({"pid": pid}).encode())
            else:  # who asked for it is gone
                selector.unregister(fd)
                for pid, asker in running.values():
                    if asker.fileno() == fd:
                        os.kill(pid, signal.SIGKILL)


def _child(fds: list[int]) -> None:
    """Never returns."""
    code = 1
    try:
        with os.fdopen(fds[1], "rb") as file:
            file.seek(0)
            wanted = json.loads(file.read())
        if wanted["session"]:
            os.setsid()
        # Out of the way first: a number that is wanted may be that of another one that came.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in fds[2:]]
        for descriptor in (fds[0], *fds[2:]):
            os.close(descriptor)
        for target, source in zip(wanted["fds"], high, strict=True):
            os.dup2(source, target)
            os.close(source)
        code = _run(wanted)
    except BaseException:
        traceback.print_exc()
    finally:
        finish(code)


def _run(wanted: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(wanted["env"])
    _show_environment(wanted["env"])
    os.chdir(wanted["cwd"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    head, *arguments = wanted["command"]
    try:
        if head == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path[0] = ""
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(arguments[0], vars(module))
        elif head == "-m":
            sys.argv = arguments
            sys.path[0] = ""
            sys.modules.pop(arguments[0], None)
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [head, *arguments]
            sys.path[0] = str(Path(head).resolve().parent)
            runpy.run_path(head, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _show_environment(env: Mapping[str, str]) -> None:
    """``/proc/PID/environ`` shows ``env``: it is the memory where the server's environment came to stand, to
    which nothing refers any more."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}\0".encode() for name, value in env.items())
    assert len(text) < end - begin, "the environment is larger than there is room for"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
