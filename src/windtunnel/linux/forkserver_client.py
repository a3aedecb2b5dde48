"""The client's side of a fork server: keep one alive, and ask it for processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base.processes import Adopted, Identity
from windtunnel.linux import processes
from windtunnel.linux.forkserver import PACKET, request_fd, send_with_fds

Answer = Callable[[dict[str, Any]], None]
PATIENCE = 120.0  # seconds that a server may take to import what it preloads
GONE = "the fork server is gone"
STANDS = 1.0
"""Seconds for which a server may be stopped: its clients wait for it without limit."""


class ForkServerKeeper:
    """Keeps a fork server at ``path``: one that lives there already, or else a new one, and, whenever `tend`
    finds it dead or stopped, another one in its place.

    The server lives in a session of its own, and with all its children until nobody holds its lifeline any
    more: this process does, and so does every process that inherits ``lifeline_fd``. ``at_end``:
    "module:function" that it calls then.
    """

    def __init__(self, path: Path, preload: tuple[str, ...], env: dict[str, str], at_end: str = "") -> None:
        self.path, self._preload, self._env, self._at_end = path, preload, env, at_end
        self._lifeline = path.with_name(f"{path.name}.lifeline")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._lifeline, 0o600)
        self.lifeline_fd = os.open(self._lifeline, os.O_RDWR | os.O_CLOEXEC)  # waits for no reader, and holds
        self.process = serving(path) or self._start()
        self._moved = time.monotonic()

    def _start(self) -> subprocess.Popen[bytes] | Adopted:
        module = "windtunnel.linux.forkserver"
        end = os.open(self._lifeline, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        command = [sys.executable, "-m", module, "--socket", str(self.path)]
        command += ["--preload", ",".join(self._preload), "--lifeline", str(end), "--at-end", self._at_end]
        # One thread: an OpenMP pool must not exist when it forks. The children set their own number.
        env = self._env | {"OMP_NUM_THREADS": "1"}
        try:
            return subprocess.Popen(
                command, env=env, pass_fds=[end], stdin=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            os.close(end)

    def tend(self) -> bool:
        """Whether it had died, or stood still for long, and was started again."""
        now = time.monotonic()
        if self.process.poll() is None:
            if processes.state(self.process.pid) not in ("T", "t"):
                self._moved = now
            if now - self._moved < STANDS:
                return False
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            if self.process.poll() is None:
                return False  # on a busy host its end may take until another turn
        self.process = self._start()
        self._moved = now
        return True

    def leave(self) -> None:
        """Leave it to those who hold its lifeline, too."""
        with contextlib.suppress(OSError):
            os.close(self.lifeline_fd)

    def close(self) -> None:
        """End it with all its children, whoever holds its lifeline."""
        self.leave()
        try:
            self.process.wait(3.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5.0)
        for path in (self.path, self._lifeline):
            path.unlink(missing_ok=True)


def serving(path: Path) -> Adopted | None:
    """The fork server that listens at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
        sock.settimeout(2.0)
        sock.connect(str(path))
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        identity = Identity.of(int.from_bytes(credentials[:4], "little"))
        return None if identity is None else Adopted(identity)
    return None


class ForkServerClient:
    """A connection to a fork server, made anew when it breaks.

    ``exited(message)`` gets every end of a child, until the server is gone.
    """

    def __init__(self, path: Path, exited: Answer) -> None:
        self.path = path
        self._exited = exited
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._answers: dict[int, tuple[socket.socket, Answer]] = {}  # with where it was asked

    def _ask(self, message: dict[str, Any], answer: Answer, fds: list[int]) -> None:
        with self._lock:
            number = next(self._numbers)
            for attempt in (1, 2):
                try:
                    sock = self._connected()
                    self._answers[number] = sock, answer
                    send_with_fds(sock, message | {"id": number}, fds)
                    return
                except OSError:  # the server of before is gone: try the one that replaced it
                    self._answers.pop(number, None)
                    self._sock = None
                    if attempt == 2:
                        raise

    def start(self, wanted: dict[str, Any], answer: Answer, outputs: tuple[int, int] | None = None) -> None:
        """Ask for what is ``wanted`` (see the module `forkserver`): ``answer`` gets ``started`` or ``failed
        {error}`` later, from another thread. ``outputs``: stdout and stderr, else the server's own.

        Raises:
            OSError: no fork server listens; ``answer`` is not called.
        """
        memory = request_fd(wanted)
        try:
            self._ask({"op": "start"}, answer, [memory, *(outputs or ())])
        finally:
            os.close(memory)

    def started(self, wanted: dict[str, Any], *, timeout: float = PATIENCE) -> int:
        """`start`, waited for: the process id.

        Raises:
            OSError: no fork server, or it could not start it within ``timeout`` seconds.
        """
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        last = time.monotonic() + timeout
        while True:
            try:
                self.start(wanted, answers.put)
                break
            except OSError:
                if time.monotonic() > last:
                    raise
                time.sleep(0.02)
        try:
            answer = answers.get(timeout=max(0.0, last - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(
                f"{self.path}: the fork server started nothing within {timeout:.0f} s"
            ) from None
        if answer["op"] != "started":
            raise OSError(f"{self.path}: {answer.get('error', GONE)}")
        return int(answer["pid"])

    def close(self) -> None:
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._sock = None

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.settimeout(2.0)
                sock.connect(str(self.path))
                sock.settimeout(None)
            except OSError:
                sock.close()
                raise
            self._sock = sock
            threading.Thread(
                target=self._read_for_ever, args=(sock,), name="forkserver-client", daemon=True
            ).start()
        return self._sock

    def _read_for_ever(self, sock: socket.socket) -> None:
        while True:
            try:
                packet = sock.recv(PACKET)
            except OSError:
                packet = b""
            if not packet:
                break
            message = json.loads(packet)
            if message["op"] == "exit":
                self._exited(message)
                continue
            with self._lock:
                request = self._answers.pop(message["id"], None)
            if request is not None:
                request[1](message)
        with self._lock:
            if self._sock is sock:
                self._sock = None
            unanswered = [number for number, (request, _) in self._answers.items() if request is sock]
            answers = [self._answers.pop(number)[1] for number in unanswered]
        sock.close()
        for answer in answers:
            answer({"op": "failed", "error": GONE})
