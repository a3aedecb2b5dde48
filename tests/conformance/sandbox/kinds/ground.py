"""What the programs of this folder share. Nothing of windtunnel is imported: they run inside of sandboxes.

A program is a generator that yields once. Before, it makes what it is about; then it is dumped and restored,
any number of times; after, it finds out whether all is as it was, and says what is not by ``Wrong``. What its
maker is refused (``Refused``) is no fault: it cannot be in a sandbox then, so nothing of it can be lost.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator

Kind = Generator[None, None, None]
libc = ctypes.CDLL(None, use_errno=True)
REFUSALS = (
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EAFNOSUPPORT,
    errno.EADDRNOTAVAIL,
)
SECONDS = 10.0
ASKED_SECONDS = 600.0
"""Within which the question comes whether all is as it was."""


class Wrong(Exception):
    """Something is not as it was, in words."""


class Refused(Exception):
    """The kernel or the sandbox refuses what the program is about, in words."""


def expect(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise Wrong(f"{what}: {repr(actual)[:200]} instead of {repr(expected)[:200]}")


def must(result: int, what: str) -> int:
    """``result`` of a C function, or Refused or Wrong by its errno."""
    if result < 0:
        number = ctypes.get_errno()
        kind = Refused if number in REFUSALS else Wrong
        raise kind(f"{what}: {os.strerror(number)}")
    return result


def asked(call: Callable[[], object], what: str) -> object:
    """What ``call`` returns; Refused where the kernel refuses it."""
    try:
        return call()
    except OSError as error:
        if error.errno in REFUSALS:
            raise Refused(f"{what}: {error.strerror}") from error
        raise


def until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Wrong(f"{what} did not come within {seconds:g} s")
        time.sleep(0.005)


def readable(descriptor: int, what: str, seconds: float = SECONDS) -> None:
    if not select.select([descriptor], [], [], seconds)[0]:
        raise Wrong(f"{what} did not become readable within {seconds:g} s")


def nothing_to_read(descriptor: int, what: str) -> None:
    if select.select([descriptor], [], [], 0)[0]:
        raise Wrong(f"{what} has something to read that it did not have")


def child(body: Callable[[], object]) -> int:
    """Run ``body`` in a child; its exit status is 0 where it returns. The child's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def ended_well(pid: int, what: str) -> None:
    _, status = os.waitpid(pid, 0)
    expect(what, os.waitstatus_to_exitcode(status), 0)


def in_child(body: Callable[[], object], what: str) -> None:
    ended_well(child(body), what)


def sleeper() -> int:
    """A child that only waits, for kinds that need another process."""
    return child(lambda: select.select([], [], []))


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def number(name: str) -> int:
    """A number of /proc/self/status."""
    with open("/proc/self/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith(name + ":")))


def passed(channel: socket.socket, descriptor: int, text: bytes = b"x") -> None:
    channel.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))])


def taken(channel: socket.socket) -> tuple[bytes, int]:
    """A message and the descriptor that came with it."""
    text, extra, _, _ = channel.recvmsg(100, socket.CMSG_SPACE(4))
    if not extra:
        raise Wrong("the descriptor that was under way with a message is gone")
    return text, int(struct.unpack("i", extra[0][2])[0])
