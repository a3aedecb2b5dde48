"""A fork server: a process that has imported what is slow to import once, and forks others from itself.

Imports take seconds, a fork takes milliseconds, so who starts programs again and again has them in their own
code almost at once. The server never starts a thread and opens no sockets but its own, so that its children
may do both.

Protocol, on a Unix socket of packets: a request carries its fds by SCM_RIGHTS, the first of them a memfd with
the JSON of what is wanted; so no request is too long for a packet. Every packet is a JSON object with "op".

    start {id}  fds: wanted[, stdout, stderr]  ->  started {id, pid} or failed {id, error}
    later, to whoever asked                    ->  exit {pid, status | signal}

What is wanted: {script, arguments} is run as the interpreter would run it; {call: "module:function",
arguments} calls ``function(arguments)``. Before either, the child takes on, where they are given, env, cwd,
namespace (the file of a network), and calls every "module:function" of ``before`` with no arguments.

A child leads a session of its own, which is killed with it. When a client's connection closes its children
are killed: a client that is gone can fence nobody. When the lifeline (a pipe that its owners hold) closes,
all children are killed, "module:function" of ``--at-end`` is called, and the server ends. The death of the
server itself kills no child.

The idea is the zygote of Android and the fork server of Python's multiprocessing.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from windtunnel.linux import namespaces

UNREAD = 5.0  # seconds that an answer may stay unread before it is dropped
PACKET = 1 << 16


def main(arguments: list[str] | None = None) -> None:
    """Entry point: ``python -m windtunnel.linux.forkserver --socket PATH --preload MODULE,MODULE``."""
    parser = argparse.ArgumentParser(prog="forkserver")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--lifeline", type=int, default=None)
    parser.add_argument("--at-end", default="")
    options = parser.parse_args(arguments)
    Path(options.socket).unlink(missing_ok=True)
    # Who connects before the imports are done waits in the queue.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(options.socket)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends everything in order
    _preload(options.preload)
    # What is there now stays in every child: none need look at it again when it collects garbage.
    gc.collect()
    gc.freeze()
    child = ForkServer(listener, options.lifeline).serve()
    if child is not None:
        child()
    elif options.at_end:
        _named(options.at_end)()


def _preload(names: str) -> None:
    """Import them. What a library prints meanwhile goes to stderr: stdout is the launcher's own."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    for name in filter(None, names.split(",")):
        try:
            importlib.import_module(name)
        except ImportError as error:  # what needs it will say so in its own words
            sys.stderr.write(f"preload {name}: {error}\n")
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.close(stdout)


class ForkServer:
    """Serves requests until the lifeline closes; in a child `serve` returns what the child is to do."""

    def __init__(self, listener: socket.socket, lifeline: int | None) -> None:
        self.listener = listener
        self.lifeline = lifeline
        self.clients: set[socket.socket] = set()
        # pid -> (its pidfd, who asked for it, whether it goes on without them)
        self.children: dict[int, tuple[int, socket.socket | None]] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        if lifeline is not None:
            self.selector.register(lifeline, selectors.EVENT_READ, self._owner_gone)
        self.ended = False
        self.task: Callable[[], None] | None = None

    def serve(self) -> Callable[[], None] | None:
        """The loop. None in the server at its end; in a forked child, its task, with all fds of the server
        closed."""
        while not self.ended:
            for key, _ in self.selector.select():
                key.data(key.fileobj)
                if self.task is not None:
                    return self.task
        for pid in list(self.children):
            _kill_session(pid)
        return None

    def _owner_gone(self, _: Any) -> None:
        self.ended = True

    def _accept(self, _: Any) -> None:
        client, _address = self.listener.accept()
        client.settimeout(UNREAD)
        self.clients.add(client)
        self.selector.register(client, selectors.EVENT_READ, self._packet)

    def _packet(self, client: socket.socket) -> None:
        try:
            packet, fds, _flags, _address = socket.recv_fds(client, PACKET, 8)
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._client_gone(client)
            return
        number = None
        try:
            request = json.loads(packet)
            number = request["id"]
            if request["op"] == "start":
                self._start(client, request, fds)
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            _reply(client, {"op": "failed", "id": number, "error": what})
        finally:
            if self.task is None:
                for fd in fds:
                    os.close(fd)

    def _client_gone(self, client: socket.socket) -> None:
        self.selector.unregister(client)
        self.clients.discard(client)
        client.close()
        for pid, (pidfd, owner) in list(self.children.items()):
            if owner is client:
                self.children[pid] = (pidfd, None)
                _kill_session(pid)

    def _start(self, client: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        if len(fds) not in (1, 3):
            raise ValueError(f"{len(fds)} descriptors came, 1 or 3 are needed")
        with os.fdopen(os.dup(fds[0]), "rb") as file:
            file.seek(0)
            task = json.loads(file.read())
        pid = self._fork(fds, lambda: run(task))
        if pid == 0:
            return
        self._watch(pid, client)
        _reply(client, {"op": "started", "id": request["id"], "pid": pid})

    def _watch(self, pid: int, client: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self.children[pid] = (pidfd, client)
        self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._reap(pid))

    def _reap(self, pid: int) -> None:
        pidfd, owner = self.children.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        # Before it is reaped its number cannot belong to another process: what it left behind goes with it.
        _kill_session(pid)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if owner is not None:
            how = {"status": code, "signal": None} if code >= 0 else {"status": None, "signal": -code}
            _reply(owner, {"op": "exit", "pid": pid, **how})

    def _fork(self, fds: list[int], task: Callable[[], None]) -> int:
        """A child that returns to `serve` with ``task``, and has nothing of the server: its pid; 0 in it."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            null, (out, err) = os.open("/dev/null", os.O_RDONLY), fds[1:] or (1, 2)
            for source, target in ((null, 0), (out, 1), (err, 2)):
                os.dup2(source, target)
            self.selector.close()
            self.listener.close()
            for client in self.clients:
                client.close()
            lifeline = [] if self.lifeline is None else [self.lifeline]
            for fd in (null, *lifeline, *fds, *(pidfd for pidfd, _ in self.children.values())):
                os.close(fd)
            self.children.clear()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.task = task
        except BaseException:
            os._exit(127)  # never go on as a second server
        return 0


def _reply(client: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone: its end is seen by its own event
        client.sendall(json.dumps(message).encode())


def _kill_session(pid: int) -> None:
    # the process itself, too: one that was just forked does not lead its session yet
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def run(request: dict[str, Any]) -> None:
    """Do what a request wants, in the child; never returns.

    Ends with ``os._exit`` after exit handlers and non-daemon threads: destructors of libraries that are still
    at work hang or abort now and then at the interpreter's own end.
    """
    status = 1
    try:
        _enter(request)
        for name in request.get("before", ()):
            _named(name)()
        if "call" in request:
            _named(request["call"])(request["arguments"])
            status = 0
        else:
            status = _run_as_main(request["script"])
    except BaseException:
        _print_traceback()
    finally:
        finish(status)


def _enter(request: dict[str, Any]) -> None:
    if "env" in request:
        os.environ.clear()
        os.environ.update(request["env"])
    if "cwd" in request:
        os.chdir(request["cwd"])
    if request.get("namespace"):
        namespaces.enter(request["namespace"])
    if "script" in request:
        sys.argv[:] = [request["script"], *request["arguments"]]
        sys.path[0] = str(Path(request["script"]).resolve().parent)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), function))


def _run_as_main(script: str) -> int:
    import runpy

    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        _print_traceback()
        return 1
    return 0


def _print_traceback() -> None:
    """The traceback of the user's program, without the frames of this module and of runpy above it."""
    import traceback

    kind, error, place = sys.exc_info()
    own = (__file__, "<frozen runpy>")
    while place is not None and place.tb_frame.f_code.co_filename in own:
        place = place.tb_next
    traceback.print_exception(kind, error, place)


def finish(status: int) -> None:
    """End this process: wait for its threads, run what is to run at exit, but no destructors."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def request_fd(request: dict[str, Any]) -> int:
    """A memfd with the ``request`` in JSON; the caller closes it."""
    handle = os.memfd_create("windtunnel-start", os.MFD_CLOEXEC)
    text = json.dumps(request).encode()
    while text:
        text = text[os.write(handle, text) :]
    return handle


def send_with_fds(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    """One packet with ``fds`` beside it."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], ancillary)


if __name__ == "__main__":
    main()
