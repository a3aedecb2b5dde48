"""The network namespace of a sandbox: made and owned by the host, so that it outlives the sandbox's
processes.

It is bound to a file, ``netns``, in the sandbox's folder on the host. It has a loopback device, and for
``host`` a pair of virtual Ethernet devices, one end with the host, with two addresses of 198.18.0.0/15 (set
aside for measuring, RFC 2544, so no real network is shadowed) and without forwarding: the host answers, the
rest of the world does not. For ``proxy`` and ``egress`` the host listens on the loopback device.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import psutil

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import listener
from windtunnel.agents.sandbox.machine.group import Group
from windtunnel.agents.sandbox.place import Home
from windtunnel.linux import namespaces
from windtunnel.linux import network as links

Use = Literal["listen on", "receive on", "connect to"]
FIRST = (198 << 24) | (18 << 16)
NETWORKS = 1 << 15
"""Number of /30 networks in 198.18.0.0/15."""


def netns_file(home: Home, box: str) -> Path:
    return home.box(box) / "netns"


def device_name(home: Home, box: str) -> str:
    """Name of the host's end; at most 15 bytes."""
    return f"wt{home.tag[:5]}{hashlib.blake2s(box.encode(), digest_size=4).hexdigest()}"


def make(home: Home, box: str, network: str) -> Path:
    """The sandbox's network namespace, as it should be; what exists stays. Raises MachineError."""
    file = netns_file(home, box)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not namespaces.holds_namespace(file):
            namespaces.make_network(file)
        if network == "host":
            _connect(file, device_name(home, box), f"{home.tag}/{box}")
        else:
            links.remove_link(device_name(home, box))
    except OSError as error:
        raise MachineError(f"the sandbox's network could not be made: {error.strerror}") from error
    return file


def remove(home: Home, box: str) -> None:
    """Remove devices and namespace; what is gone already is fine."""
    with contextlib.suppress(OSError):
        links.remove_link(device_name(home, box))
    file = netns_file(home, box)
    try:
        namespaces.release(file)
    except OSError as error:
        raise MachineError(f"cannot release the network namespace {file}: {error.strerror}") from error


def addresses(home: Home, box: str) -> tuple[str, str] | None:
    """(the host's address, the sandbox's address) of network ``host``; None when there is no pair."""
    for entry in psutil.net_if_addrs().get(device_name(home, box), []):
        if entry.family == socket.AF_INET:
            number = int.from_bytes(socket.inet_aton(entry.address))
            return entry.address, socket.inet_ntoa((number + 1).to_bytes(4))
    return None


def _connect(file: Path, device: str, who: str) -> None:
    names = psutil.net_if_addrs()
    if device in names:
        return
    taken = {
        int.from_bytes(socket.inet_aton(entry.address)) & ~3
        for entries in names.values()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    start = int.from_bytes(hashlib.blake2s(who.encode(), digest_size=2).digest())
    for step in range(NETWORKS):
        base = FIRST + ((start + step) % NETWORKS) * 4
        if base not in taken:
            break
    else:
        raise OSError(errno.EADDRNOTAVAIL, "all addresses of 198.18.0.0/15 are taken")
    own, its = (socket.inet_ntoa((base + offset).to_bytes(4)) for offset in (1, 2))
    links.make_pair(device, "eth0", file)
    try:
        # the host answers for itself and passes nothing on, whatever its forwarding is set to elsewhere
        for key, value in (("ipv4/conf/{}/forwarding", "0"), ("ipv6/conf/{}/disable_ipv6", "1")):
            with contextlib.suppress(OSError):
                Path("/proc/sys/net", key.format(device)).write_text(value)
        links.configure(device, own, 30)
        links.configure("eth0", its, 30, file)
    except BaseException:
        with contextlib.suppress(OSError):
            links.remove_link(device)
        raise


def socket_inside(netns: Path, use: Use, port: int) -> socket.socket:
    """A socket of that network namespace, held by this process: one that listens on 127.0.0.1:``port`` (by
    TCP), one that receives there (by UDP), or one that is connected to it (by TCP).

    Raises MachineError when the port is taken, nobody listens on it, or the namespace is gone.
    """
    try:
        if os.geteuid() == 0:
            return namespaces.within(netns, lambda: listener.open_socket(use, port))
        return _socket_of_user(netns, use, port)
    except OSError as error:
        raise MachineError(f"cannot {use} port {port} inside the sandbox: {error.strerror}") from error


def _socket_of_user(netns: Path, use: Use, port: int) -> socket.socket:
    """The same where the namespace is that of a sandbox's processes, not bound to ``netns``."""
    init = Group(Home(netns.parents[2]), netns.parent.name).init()
    if not init:
        raise MachineError(f"cannot {use} port {port} inside the sandbox: it does not run")
    own, its = socket.socketpair()
    with own, its:
        done = subprocess.run(
            [sys.executable, "-I", listener.__file__, str(init), use, str(port), str(its.fileno())],
            pass_fds=(its.fileno(),), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise MachineError(f"cannot {use} port {port} inside the sandbox: {done.stderr.strip()}")
        _, fds, _, _ = socket.recv_fds(own, 1, 1)
    return socket.socket(fileno=fds[0])


def launcher_words(output: str) -> str:
    """What the launcher said, as words: ``error 1 make namespaces`` becomes a reason."""
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        number, _, what = rest.partition(" ")
        if kind == "error" and number.isdigit():
            return f"cannot {what}: {os.strerror(int(number))}"
    return "the launcher ended without a word"
