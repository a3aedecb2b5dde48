"""Networks of emulated machines: each in a network namespace of its own, joined by a bridge.

Needs root and iproute2. The bridge lies in this host's namespace under a name and a 10.x net of its own, so
that supervisor and store are reached on its address; every machine has one end of a veth pair, called
`INTERFACE` inside, with a token bucket (tc-tbf) on both ends where a rate is set. Nothing leaves the host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from windtunnel.base.errors import UserError

INTERFACE = "wt0"
_NAMES = Path("/run/netns")
_BOUND = 20.0  # seconds that a command may take


def missing() -> str | None:
    """Why this host cannot emulate networks, in words; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (packages iproute2 and util-linux)"
    return None


def set_link(interface: str, *, up: bool) -> None:
    """Take an interface of this process's namespace down, or up again."""
    _run("ip", "link", "set", "dev", interface, "up" if up else "down")


def set_rate(interface: str, rate: float) -> None:
    """Limit what an interface of this process's namespace sends, to ``rate`` bytes/s."""
    _run("tc", "qdisc", "replace", "dev", interface, *_bucket(rate))


class Network:
    """One bridge and the machines on it, called after the run's ``token``; ``rate``: bytes/s of each machine
    in either direction, None for no limit."""

    def __init__(self, token: str, rate: float | None = None) -> None:
        reason = missing()
        if reason is not None:
            raise UserError(f"network netns: {reason}; accepted here is loopback")
        self.rate = rate
        self._short = token.rpartition("-")[2]
        self._bridge = f"wt{self._short}"
        self._ends: dict[str, str] = {}
        self._net = _free_net()
        self.host = f"{self._net}.1"
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        try:
            (_owners() / self._bridge).write_text(f"{os.getpid()}\n")
            _run("ip", "addr", "add", f"{self.host}/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
        except BaseException:
            self.close()
            raise

    def add(self, name: str) -> tuple[str, str]:
        """A machine: the path of its namespace, and its address."""
        number = len(self._ends)
        namespace, end = f"{self._bridge}-{number}", f"{self._bridge}p{number}"
        address = f"{self._net}.{number + 2}"
        self._ends[name] = end
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", end, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _run("ip", "link", "set", end, "master", self._bridge, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
        ):
            _run("ip", "-n", namespace, *command)
        if self.rate is not None:
            self.set_rate(name, self.rate)
        return str(_NAMES / namespace), address

    def set_rate(self, name: str, rate: float) -> None:
        """Limit a machine's link to ``rate`` bytes/s in either direction."""
        end = self._ends[name]
        inside = f"{self._bridge}-{end.rpartition('p')[2]}"
        _run("tc", "qdisc", "replace", "dev", end, *_bucket(rate))
        _run("tc", "-n", inside, "qdisc", "replace", "dev", INTERFACE, *_bucket(rate))

    def link_down(self, name: str) -> None:
        """A machine's link carries nothing more; no connection closes."""
        _run("ip", "link", "set", self._ends[name], "down")

    def link_up(self, name: str) -> None:
        """And carries again."""
        _run("ip", "link", "set", self._ends[name], "up")

    def close(self) -> None:
        """Remove all of it."""
        _remove(self._bridge)


def sweep() -> None:
    """Remove the networks of launchers that are gone."""
    if missing() is not None:
        return
    for mark in _owners().iterdir():
        if not Path(f"/proc/{mark.read_text().strip()}").exists():
            _remove(mark.name)


def _remove(bridge: str) -> None:
    if _NAMES.is_dir():
        for path in _NAMES.glob(f"{bridge}-*"):
            _try("ip", "netns", "del", path.name)
    # Pairs go with their namespace, but some time later.
    for end in Path("/sys/class/net").glob(f"{bridge}p*"):
        _try("ip", "link", "del", end.name)
    _try("ip", "link", "del", bridge)
    (_owners() / bridge).unlink(missing_ok=True)


def _owners() -> Path:
    folder = Path("/run/windtunnel-networks")
    folder.mkdir(exist_ok=True)
    return folder


def _free_net() -> str:
    """The first 10.x.y that nothing on this host uses, counted from one that depends on the process."""
    taken = _try("ip", "-4", "-o", "addr").stdout + _try("ip", "-4", "route").stdout
    for number in range(os.getpid(), os.getpid() + 40_000):
        net = f"10.{64 + number // 250 % 150}.{number % 250}"
        if f" {net}." not in taken and f"\n{net}." not in taken:
            return net
    raise UserError("network netns: no net of 10.0.0.0/8 is free")


def _bucket(rate: float) -> list[str]:
    """A token bucket of 2 ms, and a queue of 200 ms. A network card saves up nothing: with a large bucket,
    what is sent in a pause would be paid for by what follows it."""
    bits = max(8000, int(rate * 8))
    burst = max(16_000, int(rate * 0.002))
    return ["root", "tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "200ms"]


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BOUND)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_BOUND:g} s")


def _run(*command: str) -> None:
    done = _try(*command)
    if done.returncode != 0:
        raise UserError(f"network netns: `{' '.join(command)}` failed: {done.stderr.strip()}")
