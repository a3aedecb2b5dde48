"""Namespaces: enter one for a moment, keep a network in a file, start a process inside.

A namespace belongs to a thread. So whatever is to be done inside is done by a thread of its own that enters,
works and ends there: no other thread of the process notices, and nothing has to be put back.

Source: namespaces(7), setns(2), ip-netns(8) for the files that hold networks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from windtunnel.linux.system import NSFS, checked, file_system, libc

T = TypeVar("T")
KINDS = {
    "mnt": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}  # fmt: skip
"""Names as in /proc/PID/ns, with the kernel's flags."""
_BIND, _DETACH = 0x1000, 0x2
_EVERY, _PRIVATE = 0x4000, 0x40000
_OWN_ROOT = 0x200
_DIE_WITH_PARENT = 1
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def enter(where: Path | str | int, kind: str = "net") -> None:
    """Take the calling thread into a namespace, for good: a file of it, or the pidfd of a process in it.

    Raises OSError: it is gone, or this process may not enter it.
    """
    descriptor = where if isinstance(where, int) else os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if kind == "mnt":
            # the kernel lets a thread into other mounts only when it shares root and working directory
            # with no other thread
            checked(libc.unshare(_OWN_ROOT), "unshare")
        checked(libc.setns(descriptor, KINDS[kind]), str(where))
    finally:
        if not isinstance(where, int):
            os.close(descriptor)


def within(where: Path | str | int | None, work: Callable[[], T], kind: str = "net") -> T:
    """``work()`` in a thread of its own that has entered the namespace (None: stays in this one) and ends
    there. A process that it starts lives on inside. Raises what ``work`` and `enter` raise."""

    def inside() -> T:
        if where is not None:
            enter(where, kind)
        return work()

    return _in_thread(inside)


def make_network(file: Path) -> None:
    """A new network, with its loopback device up, held by ``file`` until `release`. Raises OSError."""

    def make() -> None:
        checked(libc.unshare(KINDS["net"]), "unshare")
        _loopback_up()
        file.touch()
        own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        checked(libc.mount(own.encode(), os.fsencode(file), None, _BIND, None), str(file))

    _in_thread(make)


def holds_namespace(file: Path) -> bool:
    """Whether a namespace is held there: after a restart of the machine the file is a plain, empty one."""
    return file_system(file) == NSFS


def release(file: Path) -> None:
    """Let go of the namespace that ``file`` holds and remove the file; absent is fine. Raises OSError."""
    while holds_namespace(file):
        checked(libc.umount2(os.fsencode(file), _DETACH), str(file))
    file.unlink(missing_ok=True)


def set_hostname(where: Path | int, name: str) -> None:
    """Give the uts namespace (of the process behind a pidfd) another host name. Raises OSError."""
    text = name.encode()
    within(where, lambda: checked(libc.sethostname(text, len(text)), "sethostname"), "uts")


def apart(kinds: Sequence[str], work: Callable[[], T]) -> T:
    """``work()`` in a thread of its own in new namespaces of these ``kinds``; a process that it starts lives
    on inside. What is mounted there is seen there alone. Raises what ``work`` raises, and OSError."""

    def inside() -> T:
        for kind in kinds:
            checked(libc.unshare(KINDS[kind] | (_OWN_ROOT if kind == "mnt" else 0)), "unshare")
        if "mnt" in kinds:
            checked(libc.mount(b"none", b"/", None, _EVERY | _PRIVATE, None), "/")
        return work()

    return _in_thread(inside)


def start_in_own_network(work: Callable[[], object]) -> int:
    """A child of this process, forked into a network that nothing else holds, does ``work`` and ends; its
    process id. When it ends, however it does, its network is gone, and when the calling thread ends it is
    killed: so nothing is left of either, whoever is killed.

    Raises OSError: there is no such network for this process.
    """
    reader, writer = os.pipe()
    own, child = os.getpid(), os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            checked(libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")
            if os.getppid() == own:  # else it has ended before that was said
                failed = libc.unshare(KINDS["net"])
                os.write(writer, (ctypes.get_errno() if failed else 0).to_bytes(4, "little"))
                os.close(writer)
                if not failed:
                    work()
                    status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as answer:
        code = int.from_bytes(answer.read(4), "little")
    if code:
        os.waitpid(child, 0)
        raise OSError(code, os.strerror(code), "unshare")
    return child


def _in_thread(work: Callable[[], T]) -> T:
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="windtunnel-namespace")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _loopback_up() -> None:
    # an ioctl: whoever needs a loopback device only need not load a library for links
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as plug:
        request = struct.pack("16sh22x", b"lo", 0)
        _, flags = struct.unpack("16sh22x", fcntl.ioctl(plug, _GET_FLAGS, request))
        fcntl.ioctl(plug, _SET_FLAGS, struct.pack("16sh22x", b"lo", flags | _UP))
