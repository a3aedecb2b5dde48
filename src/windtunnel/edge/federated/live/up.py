"""A Flower app on this machine: a server and devices, each in a network of its own with a link of its rate.

Flower's own programs run, as they would on many machines: a SuperLink, a SuperNode for each device, and
``flwr run``. All are in one namespace of processes, whose first one waits for our end: with it the kernel
ends all others. Another that waits removes the network. What crossed the links is read from the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shutil import which

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.base.keys import Keys
from windtunnel.edge.federated.policy import CAPABILITY
from windtunnel.linux import network
from windtunnel.store.runs import Store

APP = Path(__file__).with_name("digits")
PORT, PEER = 8000, 9100
TIMEOUT, STARTS = 1800.0, 120.0
PROGRAMS = ("nsenter", "unshare")


@dataclass(frozen=True)
class LiveRounds:
    """Measured. ``seconds``: of all rounds, programs' starts included; ``round_seconds``: of each. Bytes:
    what the server's link, and all links together, carried in both directions, requests and app included.
    ``accuracy``: after each round; of the app that comes with this alone."""

    run: str
    devices: int
    groups: int
    rounds: int
    seconds: float
    server_bytes: int
    all_bytes: int
    round_seconds: list[float]
    accuracy: list[float]
    events: list[str]
    source: str = "measured"


def up(
    *, app: Path | None = None, devices: int = 8, groups: int = 2, rounds: int = 3, model_bytes: float = 1e6,
    server_link: float = 2.5e6, device_link: float = 2.5e6, timeout: float = TIMEOUT,
) -> LiveRounds:  # fmt: skip
    """Run ``app`` (a Flower app's folder; without it one that learns digits) and wait for it.

    Raises:
        UserError: this machine cannot emulate networks, or Flower is not installed.
        ScriptError: the app failed, or did not end within ``timeout`` seconds.
    """
    _check(app, devices, groups, rounds)
    run = Store.open().begin(
        CAPABILITY, {"app": str(app or "digits"), "devices": devices, "groups": groups}, 0
    )
    with run.failing(), _network(run.id, server_link, devices, device_link) as net, _processes() as holder:
        folder, secret, result = run.directory, run.directory / "secret", run.directory / "result.json"
        Keys.new().write(secret)
        (server, here), link = net.server, f"{net.server[1]}:{PORT}"
        (folder / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{link}"\ninsecure = true\n'
        )
        words = ["--insecure", "--host", here, f"--port={PORT}", "--disable-runtime-dependency-installation"]
        superlink = _start(holder, folder, "server", server, "flower-superlink", *words)
        _until_listening(superlink, (here, PORT), folder)
        for place, (space, address) in enumerate(net.devices):
            own = f'partition-id={place} peer="{address}:{PEER}" peer-secret="{secret}"'
            words = ["--insecure", "--superlink", link, "--node-config", own]
            _start(holder, folder, f"device-{place}", space, "flower-supernode", *words)
        config = f"devices={devices} groups={groups} rounds={rounds} padding={int(model_bytes)}"
        words = [] if app else ["--run-config", f'{config} result="{result}"']
        before, begun = net.carried(), time.monotonic()
        job = _start(
            holder, folder, "run", server, "flwr", "run", str(app or APP), "here", "--stream", *words
        )
        _wait(job, superlink, folder, timeout)
        seconds, after = time.monotonic() - begun, net.carried()
        if app is None and not result.exists():
            raise ScriptError(f"federated: the app did not come to its end; see {folder / 'run.log'}")
        output = json.loads(result.read_text()) if app is None else {"rounds": [], "events": []}
        ends = [entry["ended"] for entry in output["rounds"]]
        outcome = LiveRounds(
            run.id, devices, groups, rounds, seconds, after[0] - before[0], sum(after) - sum(before),
            [later - earlier for earlier, later in pairwise(ends)],
            [entry["accuracy"] for entry in output["rounds"][1:]], output["events"],
        )  # fmt: skip
        run.finish({"seconds": seconds, "server_bytes": outcome.server_bytes, "accuracy": outcome.accuracy})
    return outcome


def _check(app: Path | None, devices: int, groups: int, rounds: int) -> None:
    if reason := network.missing():
        raise UserError(f"federated up: {reason}; `federated run` needs none of it")
    absent = [name for name in PROGRAMS if which(name) is None]
    if absent or not (Path(sys.executable).parent / "flwr").exists():
        what = ", ".join(absent) or "Flower (pip install 'windtunnel[edge]')"
        raise UserError(f"federated up: {what} is not installed")
    if not (2 <= devices <= 200 and 0 <= groups <= devices and rounds >= 1):
        raise UserError(
            f"`devices` {devices}, `groups` {groups}, `rounds` {rounds}: accepted are 2 to 200 devices,"
            " groups from 0 to as many, rounds from 1 up"
        )
    if app is not None and not (app / "pyproject.toml").exists():
        raise UserError(f"`app` {app}: no Flower app, it has no pyproject.toml")


@dataclass(frozen=True)
class _Net:
    """Namespace and address of each."""

    bridge: network.Network
    server: tuple[str, str]
    devices: list[tuple[str, str]]

    def carried(self) -> list[int]:
        """Bytes of each link in both directions, the server's first."""
        names = ["server", *(f"device-{place}" for place in range(len(self.devices)))]
        folders = [Path(f"/sys/class/net/{self.bridge.port(name)}/statistics") for name in names]
        return [
            sum(int((folder / way).read_text()) for way in ("rx_bytes", "tx_bytes")) for folder in folders
        ]


@contextmanager
def _network(token: str, server: float, devices: int, device: float) -> Iterator[_Net]:
    network.sweep()
    bridge = network.Network(token)
    # its input ends when this process does, however that comes
    words = [
        sys.executable,
        "-c",
        "import sys; sys.stdin.read(); from windtunnel.linux import network; network.sweep()",
    ]
    sweeper = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    try:
        own = bridge.add("server")
        bridge.set_rate("server", server)
        places = []
        for place in range(devices):
            places.append(bridge.add(f"device-{place}"))
            bridge.set_rate(f"device-{place}", device)
        yield _Net(bridge, own, places)
    finally:
        bridge.close()
        sweeper.communicate()


@contextmanager
def _processes() -> Iterator[int]:
    """A namespace of processes, and mounts, under the number of a process; all in it end with this one."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo; read -r end"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        if not holder.stdout.readline():
            raise UserError("federated up: this machine has no namespaces of processes")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _start(
    holder: int, folder: Path, name: str, space: str, program: str, *words: str
) -> subprocess.Popen[bytes]:
    """One of Flower's programs in a network namespace; what it says goes to ``folder``."""
    home = folder / name
    home.mkdir()
    (home / "config.toml").write_text((folder / "config.toml").read_text())
    own = Path(sys.executable).parent
    environment = {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "PATH": f"{own}:{os.environ.get('PATH', '')}",
    }  # fmt: skip
    spaces = [f"--net={space}", f"--pid=/proc/{holder}/ns/pid_for_children", f"--mount=/proc/{holder}/ns/mnt"]
    command = ["nsenter", *spaces, str(own / program), *words]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )


def _until_listening(server: subprocess.Popen[bytes], address: tuple[str, int], folder: Path) -> None:
    end = time.monotonic() + STARTS
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(address, 1.0):
            return
        time.sleep(0.05)
    raise ScriptError(f"federated: the SuperLink does not listen; see {folder / 'server.log'}")


def _wait(
    job: subprocess.Popen[bytes], server: subprocess.Popen[bytes], folder: Path, timeout: float
) -> None:
    end = time.monotonic() + timeout
    while job.poll() is None:
        if time.monotonic() > end or server.poll() is not None:
            raise ScriptError(f"federated: no end in {timeout:g} s, or the server ended; see {folder}/*.log")
        time.sleep(0.05)
    if job.returncode:
        raise ScriptError(f"federated: `flwr run` ended with {job.returncode}; see {folder / 'run.log'}")
