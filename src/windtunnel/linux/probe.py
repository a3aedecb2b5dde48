"""What this host can do with networks: every thing is tried, where it harms nobody, or looked up.

Queues are put on a link in a network namespace of its own, which ends with the trial; programs are loaded and
let go of. A thing that is missing comes with the reason, as the kernel tells it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.linux import LinuxError, bpf, namespaces, network, queues

QUEUES = {
    "tbf": "links of a given rate",
    "htb": "a class and a rate for each sharer: the baseline of network.sharing",
    "clsact": "programs on what an interface sends and receives: network.sharing live",
    "ingress": "filters on what an interface receives",
    "netem": "links with delay and loss; without it they come from relays",
    "fq": "pacing by the kernel: without it a program cannot delay packets",
    "fq_codel": "a baseline of queueing delay; without it in the twin only",
    "codel": "a baseline of queueing delay; without it in the twin only",
    "red": "marking by a queue; without it in the twin only",
    "prio": "strict priorities; without it HTB's",
    "drr": "a baseline of sharing; without it in the twin only",
    "pfifo": "a queue cut to so many packets",
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "tbf": {"rate": "8mbit", "burst": 16_000, "latency": "200ms"},
    "htb": {"handle": 0x10000, "default": 2},
}
_STRUCT_OPS = b"bpf_struct_ops_tcp_congestion_ops"
_RETURNS = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@dataclass(frozen=True)
class HostFeature:
    """One thing. ``gives``: what it is good for. ``missing``: why it is not there, "" where it is."""

    name: str
    gives: str
    missing: str = ""

    @property
    def present(self) -> bool:
        return not self.missing


def probed() -> list[HostFeature]:
    """All of them; what cannot even be tried says why."""
    root = "" if os.geteuid() == 0 else "this process is not root"
    links = network.missing() or _failed(lambda: namespaces.apart(["net"], _pair))
    rows = [
        HostFeature("root", "all that changes a network; without it the twins only", root),
        HostFeature(
            "namespaces", "hosts of their own on this machine, for benches and emulated jobs", links or ""
        ),
    ]
    for kind, gives in QUEUES.items():
        why = links or _failed(lambda kind=kind: namespaces.apart(["net"], lambda: _queue(kind)))  # type: ignore[misc]
        rows.append(HostFeature(f"queue {kind}", gives, why))
    program = root or _failed(_program)
    lock = root or _failed(lambda: os.close(bpf.Map(bpf.ARRAY, 4, 16, 1, lock=True).fd))
    trie = root or _failed(lambda: os.close(bpf.Map(bpf.LPM_TRIE, 20, 4, 1).fd))
    types = _failed(lambda: bpf.VMLINUX.read_bytes())
    return [
        *rows,
        HostFeature(
            "BPF programs on packets",
            "network.sharing live, and the trial of it on recorded packets",
            program,
        ),
        HostFeature("BPF locks", "network.sharing live on hosts with several processors", lock),
        HostFeature("BPF prefixes", "network.sharing by source or destination", trie),
        HostFeature("cgroup v2", "network.sharing by cgroup", "" if _cgroups() else "no cgroup2 is mounted"),
        HostFeature("BTF", "the kernel's types, which congestion controls in BPF are written against", types),
        HostFeature(
            "struct_ops", "congestion controls in BPF: network.hostrate live", types or _struct_ops()
        ),
        *_controls(),
    ]


def _failed(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _pair() -> None:
    network.ask(lambda route: route.link("add", ifname="wtp0", kind="veth", peer={"ifname": "wtp1"}))


def _queue(kind: str) -> None:
    _pair()
    if kind == "clsact":
        queues.make_clsact("wtp0")
        return
    try:
        queues.try_queue("wtp0", kind, **_SETTINGS.get(kind, {}))
    except LinuxError as error:
        if error.errno == errno.ENOENT:
            raise LinuxError("the kernel has no queue of this kind") from None
        if error.errno != errno.EINVAL:  # it is there, and wants settings
            raise


def _program() -> None:
    code = bpf.loaded(bpf.BpfProgram("probe", _RETURNS, (), "tc"), {})
    try:
        bpf.tried(code, bpf.Packet(bytes(14), 14))
    finally:
        os.close(code)


def _cgroups() -> bool:
    return any(line.split()[2] == "cgroup2" for line in Path("/proc/mounts").read_text().splitlines())


def _struct_ops() -> str:
    if _STRUCT_OPS not in bpf.VMLINUX.read_bytes():
        return "the kernel's types have no congestion controls in BPF"
    try:
        ctypes.CDLL("libbpf.so.1")
    except OSError:
        return "libbpf.so.1 is not installed: apt-get install libbpf1"
    return ""


def _controls() -> list[HostFeature]:
    try:
        controls = _CONTROLS.read_text(encoding="ascii").split()
    except OSError:
        controls = []
    gives = {"reno": "", "cubic": "", "bbr": "", "dctcp": "; without it one in BPF"}
    return [
        HostFeature(f"congestion control {name}", f"a sender to compare with{more}",
              "" if name in controls else f"the kernel has {' '.join(controls) or 'none'}")
        for name, more in gives.items()
    ]  # fmt: skip
