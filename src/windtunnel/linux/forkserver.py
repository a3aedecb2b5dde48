"""The zygote: a process that has imported torch once and forks every trainer of this machine from itself.

Importing torch takes seconds; a fork takes milliseconds, so a replaced trainer is in the user's script almost
at once. The zygote never starts a thread and opens no process group, so that its children may do both.

Protocol, on a Unix socket of packets: a request carries its fds by SCM_RIGHTS, the first of them a memfd with
the JSON of what is wanted; so no request is too long for a packet. Every packet is a JSON object with "op".

    start {id}  fds: request {script, arguments, env, cwd, namespace}, stdout, stderr  ->  started {id, pid}
    store {id, host}                                                     ->  started {id, pid, port}
    later, to whoever asked                                              ->  exit {pid, status | signal}

A trainer leads a session of its own, which is killed with it. When a client's connection closes its trainers
are killed: an agent that is gone can fence nobody. A store lives on, since the supervisor that asked for it
may be restarted. When the lifeline (a pipe that the owner holds) closes, all children are killed and the
zygote ends. The death of the zygote itself kills no trainer.

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
from typing import Any

UNREAD = 5.0  # seconds that an answer may stay unread before it is dropped
PACKET = 1 << 16
CLONE_NEWNET = 0x40000000


def main(arguments: list[str] | None = None) -> None:
    """Entry point: ``python -m windtunnel.linux.forkserver --socket PATH --preload torch``."""
    parser = argparse.ArgumentParser(prog="zygote")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--lifeline", type=int, default=None)
    options = parser.parse_args(arguments)
    Path(options.socket).unlink(missing_ok=True)
    # Who connects before the imports are done waits in the queue.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(options.socket)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends everything in order
    for name in filter(None, options.preload.split(",")):
        importlib.import_module(name)
    # What is there now stays in every child: none need look at it again when it collects garbage.
    gc.collect()
    gc.freeze()
    child = Zygote(listener, options.lifeline).serve()
    if child is not None:
        child()


class Zygote:
    """Serves requests until the lifeline closes; in a child `serve` returns what the child is to do."""

    def __init__(self, listener: socket.socket, lifeline: int | None) -> None:
        self.listener = listener
        self.lifeline = lifeline
        self.clients: set[socket.socket] = set()
        # pid -> (its pidfd, who asked for it, whether it goes on without them)
        self.children: dict[int, tuple[int, socket.socket | None, bool]] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        if lifeline is not None:
            self.selector.register(lifeline, selectors.EVENT_READ, self._owner_gone)
        self.ended = False
        self.task: Callable[[], None] | None = None

    def serve(self) -> Callable[[], None] | None:
        """The loop. None in the zygote at its end; in a forked child, its task, with all fds of the zygote
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
                self._start(client, number, fds)
            elif request["op"] == "store":
                self._store(client, number, request["host"])
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
        for pid, (_, owner, stays) in list(self.children.items()):
            if owner is client:
                self.children[pid] = (self.children[pid][0], None, stays)
                if not stays:
                    _kill_session(pid)

    def _start(self, client: socket.socket, number: int, fds: list[int]) -> None:
        memory, out, err = fds
        with os.fdopen(os.dup(memory), "rb") as file:
            file.seek(0)
            wanted = json.loads(file.read())
        pid = self._fork(fds, out, err, lambda: run_script(wanted))
        if pid == 0:
            return
        self._watch(pid, client, stays=False)
        _reply(client, {"op": "started", "id": number, "pid": pid})

    def _store(self, client: socket.socket, number: int, host: str) -> None:
        listener = socket.create_server((host, 0), backlog=512)
        port = listener.getsockname()[1]
        handle = listener.fileno()
        pid = self._fork([], 1, 2, lambda: run_store(host, port, handle))
        if pid == 0:
            listener.detach()
            return
        listener.close()
        self._watch(pid, client, stays=True)
        _reply(client, {"op": "started", "id": number, "pid": pid, "port": port})

    def _watch(self, pid: int, client: socket.socket, *, stays: bool) -> None:
        pidfd = os.pidfd_open(pid)
        self.children[pid] = (pidfd, client, stays)
        self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._reap(pid))

    def _reap(self, pid: int) -> None:
        pidfd, owner, _ = self.children.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        # Before it is reaped its number cannot belong to another process: what it left behind goes with it.
        _kill_session(pid)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if owner is not None:
            how = {"status": code, "signal": None} if code >= 0 else {"status": None, "signal": -code}
            _reply(owner, {"op": "exit", "pid": pid, **how})

    def _fork(self, fds: list[int], out: int, err: int, task: Callable[[], None]) -> int:
        """A child that returns to `serve` with ``task``, and has nothing of the zygote: its pid; 0 in it."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            null = os.open("/dev/null", os.O_RDONLY)
            for source, target in ((null, 0), (out, 1), (err, 2)):
                os.dup2(source, target)
            self.selector.close()
            self.listener.close()
            for client in self.clients:
                client.close()
            lifeline = [] if self.lifeline is None else [self.lifeline]
            for fd in (null, *lifeline, *fds, *(pidfd for pidfd, _, _ in self.children.values())):
                os.close(fd)
            self.children.clear()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.task = task
        except BaseException:
            os._exit(127)  # never go on as a second zygote
        return 0


def _reply(client: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone: its end is seen by its own event
        client.sendall(json.dumps(message).encode())


def _kill_session(pid: int) -> None:
    # the process itself, too: one that was just forked does not lead its session yet
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def run_script(wanted: dict[str, Any]) -> None:
    """Run a script as ``__main__``, as the interpreter would; never returns.

    Ends with ``os._exit`` after exit handlers and non-daemon threads: destructors of process groups that are
    still open hang or abort now and then at the interpreter's own end.
    """
    status = 1
    try:
        _enter(wanted)
        status = _run_as_main(wanted["script"])
    except BaseException:
        _print_traceback()
    finally:
        _finish(status)


def _enter(wanted: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    if wanted.get("namespace"):
        enter_network(wanted["namespace"])
    sys.argv[:] = [wanted["script"], *wanted["arguments"]]
    sys.path[0] = str(Path(wanted["script"]).resolve().parent)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if "torch.distributed.rendezvous" in sys.modules and "WINDTUNNEL_PREFIX" in os.environ:
        _prefix_store(os.environ["WINDTUNNEL_PREFIX"])


def _prefix_store(prefix: str) -> None:
    """Let ``env://`` of a script that does not use `elastic.run` meet under ``prefix``.

    torch takes an agent's store as it is, since torchrun makes a new one for every restart; ours serves all
    generations, and what an earlier one left in it would be taken for the peers' addresses.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    plain = rendezvous._create_c10d_store

    def create(*arguments: Any, **options: Any) -> Any:
        return PrefixStore(prefix, plain(*arguments, **options))

    rendezvous._create_c10d_store = create


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


def _finish(status: int) -> None:
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


def enter_network(path: str) -> None:
    """Join the network namespace at ``path`` (``/run/netns/NAME``); needs root.

    Raises:
        OSError: it is gone, or this process may not join it.
    """
    import ctypes

    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(handle)


def run_store(host: str, port: int, listener: int) -> None:
    """Serve a TCPStore on a socket that listens already, until killed."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener,
    )
    while store is not None:
        signal.pause()


def request_fd(wanted: dict[str, Any]) -> int:
    """A memfd with ``wanted`` in JSON; the caller closes it."""
    handle = os.memfd_create("windtunnel-start", os.MFD_CLOEXEC)
    text = json.dumps(wanted).encode()
    while text:
        text = text[os.write(handle, text) :]
    return handle


def send_with_fds(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    """One packet with ``fds`` beside it."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], ancillary)


if __name__ == "__main__":
    main()
