"""A program of its own, of the standard library alone: keeps a daemon running, and what must outlive it.

    watchdog.py HOME COMMAND…

It starts ``COMMAND`` and speaks to it as systemd does (sd_notify(3), sd_listen_fds(3)), so a daemon under
systemd needs no watchdog. The daemon gives it copies of its sockets: the one for commands, and those on which
the model proxy listens inside the sandboxes, with the connections that wait there for a reply. When the
daemon dies by a signal or with an error, it is started again with all of them, and meanwhile the kernel
queues whoever connects. After `PATIENCE` seconds without a daemon those who ask the model proxy are told 503.

A daemon that never got ready, or says that what it was asked for is wrong (status 2), is not started again,
nor one that dies `QUICK_DEATHS` times in a row within `QUICK` seconds each. When a daemon has ended for good,
the sockets of the model proxy are kept for `PATIENCE` seconds for a successor, which fetches them at
``HOME/held.sock``; unless it is the watchdog that was told to end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import stat
import sys
import time

PATIENCE = float(os.environ.get("WINDTUNNEL_SANDBOX_PATIENCE", "60"))
QUICK = 10.0
QUICK_DEATHS = 5
LONGEST_PAUSE = min(5.0, PATIENCE)
PROXY = ("listen.", "call.")
"""How the names of the model proxy's sockets begin: its listening ones, its connections."""
BODY = (
    b'{"type": "error", "error": {"type": "unavailable", '
    b'"message": "windtunnel: the daemon is down; ask again"}}'
)
DOWN = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
WRONG_INPUT = 2


class Watchdog:
    """One daemon, its descriptors by name, and the signals that this process gets."""

    def __init__(self, home: str, command: list[str]) -> None:
        self.home, self.command = home, command
        self.held: dict[str, list[int]] = {}
        self.pid = self.pidfd = 0
        self.ready = self.was_ready = self.ending = False
        self.absent = time.monotonic()
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.notify.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.notify.bind("")  # an address that the kernel makes up
        self.notify.setblocking(False)
        self.wakeup, theirs = socket.socketpair()
        for one in (self.wakeup, theirs):
            one.setblocking(False)
        self._theirs = theirs
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    # --- the daemon

    def start(self) -> None:
        """Start the daemon with all that is held, as systemd would."""
        names = [name for name, fds in self.held.items() for _ in fds]
        given = [fd for fds in self.held.values() for fd in fds]
        env = {key: value for key, value in os.environ.items() if not key.startswith("LISTEN_")}
        env["NOTIFY_SOCKET"] = "@" + self.notify.getsockname()[1:].decode("latin-1")
        self.ready = False
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # out of the way first: a number that is wanted may be that of another one
                high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(given)) for fd in given]
                for place, fd in enumerate(high, 3):
                    os.dup2(fd, place)
                if given:
                    env |= {"LISTEN_FDS": str(len(given)), "LISTEN_FDNAMES": ":".join(names)}
                    env["LISTEN_PID"] = str(os.getpid())
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(self.command[0], self.command, env)
            except OSError as error:
                say(f"{self.command[0]} cannot be started: {error.strerror}")
            finally:
                os._exit(WRONG_INPUT)
        self.pidfd = os.pidfd_open(self.pid)

    def run(self) -> int:
        """Until the daemon has ended for good; its exit status."""
        quick = 0
        while True:
            self.start()
            began = time.monotonic()
            self.wait(None, self.pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.pidfd)
            self.take()  # what it said last
            died = self.pid
            self.pid, self.ready, self.absent = 0, False, time.monotonic()
            if self.ending or status in (0, WRONG_INPUT) or not self.was_ready:
                return self.park(status if status >= 0 else 128 - status)
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            quick = quick + 1 if time.monotonic() - began < QUICK else 1
            if quick >= QUICK_DEATHS:
                say(f"the daemon (process {died}) {how}, as {QUICK_DEATHS} in a row did; it is given up")
                return self.park(1)
            pause = min(0.1 * 4 ** (quick - 1) if quick > 1 else 0.0, LONGEST_PAUSE)
            say(f"the daemon (process {died}) {how}; it is started again in {pause:g} s")
            self.wait(time.monotonic() + pause, 0)
            if self.ending:
                return self.park(0)

    def park(self, status: int) -> int:
        """Keep the model proxy's sockets for a successor for a while; ``status``."""
        for name in [one for one in self.held if not one.startswith(PROXY)]:
            self.drop(name)
        if self.ending or not any(name.startswith(PROXY[0]) for name in self.held):
            return status
        path = os.path.join(self.home, "held.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            before = os.umask(0o177)
            line.bind(path)
            os.umask(before)
            line.listen(1)
            if self.wait(self.absent + PATIENCE, line.fileno()):
                successor, _ = line.accept()
                with successor, contextlib.suppress(OSError):
                    for name, fds in self.held.items():
                        socket.send_fds(successor, [name.encode()], fds)
            else:
                self.refuse()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return status

    # --- waiting

    def wait(self, until: float | None, other: int) -> bool:
        """Until ``other`` can be read (true), until that time, or until this process is told to end while
        there is no daemon. Takes what the daemon says meanwhile."""
        watched = select.poll()
        for fd in (self.notify.fileno(), self.wakeup.fileno(), *([other] if other else [])):
            watched.register(fd, select.POLLIN)
        while True:
            limit = until
            if not self.ready and (until is None or self.absent + PATIENCE < until):
                limit = max(self.absent + PATIENCE, time.monotonic() + 1.0)
            left = None if limit is None else max(limit - time.monotonic(), 0.0) * 1000
            events = {fd for fd, _ in watched.poll(left)}
            if self.wakeup.fileno() in events:
                for number in self.wakeup.recv(64):
                    self.ending = True
                    if self.pid:
                        os.kill(self.pid, number)
            self.take()
            if other in events:
                return True
            if self.ending and not self.pid:
                return False
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            if not self.ready and now >= self.absent + PATIENCE:
                self.refuse()

    def take(self) -> None:
        """Read all that the daemon has said by now, and keep or drop what it names."""
        while True:
            try:
                text, control, _, _ = self.notify.recvmsg(4096, 4096, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            fds: list[int] = []
            sender = 0
            for level, kind, data in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += memoryview(data[: len(data) // 4 * 4]).cast("i").tolist()
                elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    sender = int.from_bytes(data[:4], sys.byteorder)
            told = dict(line.partition("=")[::2] for line in text.decode("utf-8", "replace").split("\n"))
            name = told.get("FDNAME", "")
            if sender != self.pid:
                told, name = {}, ""
            if told.get("READY") == "1":
                self.ready = self.was_ready = True
            if told.get("FDSTOREREMOVE") == "1":
                self.drop(name)
            if told.get("FDSTORE") == "1" and name:
                self.held.setdefault(name, []).extend(fds)
            else:
                for fd in fds:
                    os.close(fd)

    def drop(self, name: str) -> None:
        for fd in self.held.pop(name, ()):
            os.close(fd)

    def refuse(self) -> None:
        """Tell those who have waited for the model proxy that there is none."""
        for name in [one for one in self.held if one.startswith(PROXY[1])]:
            plugs = [fd for fd in self.held[name] if stat.S_ISSOCK(os.fstat(fd).st_mode)]
            notes = [os.pread(fd, 2, 0) for fd in self.held[name] if fd not in plugs]
            for fd in plugs:
                with socket.socket(fileno=os.dup(fd)) as plug, contextlib.suppress(OSError):
                    # it asked something, and nothing was answered yet
                    asked = [note for note in notes if note[:1] == b"+" and note[1:]]
                    told(plug) if asked else plug.shutdown(socket.SHUT_RDWR)
            self.drop(name)
        for name in [one for one in self.held if one.startswith(PROXY[0])]:
            with socket.socket(fileno=os.dup(self.held[name][0])) as listener:
                listener.setblocking(False)
                while True:
                    try:
                        plug, _ = listener.accept()
                    except OSError:
                        break
                    with plug, contextlib.suppress(OSError):
                        told(plug)


def told(plug: socket.socket) -> None:
    """Answer a connection, whatever it asked, and end it."""
    plug.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while plug.recv(1 << 16):  # what is left unread would reset the connection before the answer is read
            pass
    plug.send(DOWN)
    plug.shutdown(socket.SHUT_RDWR)


def say(words: str) -> None:
    print(f"windtunnel: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(Watchdog(sys.argv[1], sys.argv[2:]).run())
