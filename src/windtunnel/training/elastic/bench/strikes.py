"""What strikes a running job from outside: signals, its files, its network, and bytes on its sockets.

Each strike is a function of the `Target`, and returns what undoes it where something stays: a process that
stands still, a link that is down, a full disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.linux import processes
from windtunnel.training import cleanup
from windtunnel.training.checkpoint.bench import forge
from windtunnel.training.launch import Launched

Undo = Callable[[], None]
SLOW = 2e5  # bytes/s of a slow link; of the others there is no limit
FAST = 1e9
FUTURE = 1_000_000  # steps by which a forged checkpoint is newer
PATIENCE = 30.0
ANSWER = 2.0  # seconds that a socket is listened to, after what was sent to it


class Impossible(RuntimeError):
    """A strike finds nothing to strike."""


@dataclass
class Target:
    """``stored``: folder of checkpoints on a file system of its own. ``rank``: whom to strike."""

    launched: Launched
    stored: Path
    random: Random
    rank: int = 0

    def place(self, place: int | None = None) -> dict[str, Any]:
        """What stands at a place (`Launched.places`); a host that is being replaced is waited for."""
        end = time.monotonic() + PATIENCE
        wanted = self.rank if place is None else place
        while time.monotonic() < end and self.launched.outcome is None:
            status = self.launched.places().get(wanted)
            if status is not None and status["workers"]:
                return status
            time.sleep(0.02)
        raise Impossible(f"nobody came to place {wanted}")

    def trainer(self, rank: int | None = None) -> int:
        """The process of a rank."""
        wanted = self.rank if rank is None else rank
        return int(self.place(wanted)["workers"][wanted])

    def process(self, part: str) -> int:
        """The process of the run whose command line has ``part``."""
        for pid in cleanup.marked(self.launched.token):
            if part in processes.command_line(pid):
                return pid
        raise Impossible(f"there is no process {part}")

    def hosts(self) -> Iterator[str]:
        """Names of the hosts in the run's network, by place, from the command lines of their agents."""
        for _, status in sorted(self.launched.places().items()):
            name = re.search(r"([^/ ]+)\.config", processes.command_line(status["pid"]))
            if name is not None:
                yield name[1]

    def ports(self) -> list[tuple[str, int]]:
        """Where processes of the run listen for TCP, in whatever network they are."""
        found = set()
        for pid in cleanup.marked(self.launched.token):
            with contextlib.suppress(psutil.Error):
                for one in psutil.Process(pid).net_connections("tcp"):
                    if one.status == psutil.CONN_LISTEN:
                        found.add((one.laddr.ip, one.laddr.port))
        return sorted(found)


def _signal(pid: int, number: int) -> Undo:
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return _nothing

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return go_on


def _nothing() -> None:
    pass


def trainer_killed(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGKILL)


def trainer_stopped(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGSTOP)


def trainer_hung_up(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGHUP)


def trainer_ended(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGTERM)


def agent_killed(target: Target) -> Undo:
    return _signal(target.place()["pid"], signal.SIGKILL)


def agent_stopped(target: Target) -> Undo:
    return _signal(target.place()["pid"], signal.SIGSTOP)


def supervisor_killed(target: Target) -> Undo:
    return _signal(target.process("elastic.live.supervise"), signal.SIGKILL)


def supervisor_stopped(target: Target) -> Undo:
    return _signal(target.process("elastic.live.supervise"), signal.SIGSTOP)


def forkserver_killed(target: Target) -> Undo:
    return _signal(target.process("--preload"), signal.SIGKILL)


def store_killed(target: Target) -> Undo:
    stores = [event for event in target.launched.events() if event["kind"] == "store" and event.get("pid")]
    if not stores:
        raise Impossible("there is no store")
    return _signal(stores[-1]["pid"], signal.SIGKILL)


def host_lost(target: Target) -> Undo:
    """The workers, the agent and the memory of a host, at once."""
    status = target.place()
    for pid in (status["pid"], *status["workers"].values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(status["memory"], ignore_errors=True)
    return _nothing


def killed_in_recovery(target: Target) -> Undo:
    """Two trainers, the second while the job recovers from the first."""
    trainer_killed(target)
    time.sleep(target.random.uniform(0.05, 0.5))
    other = (target.rank + 1) % target.launched.job.hosts
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.trainer(other), signal.SIGKILL)
    return _nothing


def memory_wiped(target: Target) -> Undo:
    """All slots that a host holds, under the hands of its agent and its trainer."""
    for path in Path(target.place()["memory"]).rglob("*.slot"):
        path.unlink(missing_ok=True)
    return _nothing


def bit_flipped(target: Target) -> Undo:
    """In every slot of a host; then its trainer goes, so that they are read."""
    forge.flip_memory(Path(target.place()["memory"]))
    return trainer_killed(target)


def checkpoint_forged(target: Target) -> Undo:
    """A whole checkpoint of the future, in storage and in a host's memory; then its trainer goes."""
    if not forge.forge_stored(str(target.stored), FUTURE):
        raise Impossible("nothing is in storage yet")
    forge.forge_memory(Path(target.place()["memory"]), FUTURE)
    return trainer_killed(target)


def disk_full(target: Target) -> Undo:
    """The storage of checkpoints, which has a file system of its own."""
    filler = target.stored / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    return lambda: filler.unlink(missing_ok=True)


def link_down(target: Target) -> Undo:
    network, name = target.launched.network, list(target.hosts())[target.rank]
    assert network is not None
    network.link_down(name)
    return lambda: network.link_up(name)


def link_slow(target: Target) -> Undo:
    network, name = target.launched.network, list(target.hosts())[target.rank]
    assert network is not None
    network.set_rate(name, SLOW)
    return lambda: network.set_rate(name, FAST)


def link_cut(target: Target) -> Undo:
    """Between two hosts alone; the supervisor reaches both."""
    network, names = target.launched.network, list(target.hosts())
    assert network is not None
    one, other = names[target.rank], names[(target.rank + 1) % len(names)]
    network.part(one, other, apart=True)
    return lambda: network.part(one, other, apart=False)


def malformed(target: Target) -> Undo:
    """To every port of the run: nothing, half a frame, lengths beyond all bounds, deep brackets, noise."""
    deep = b"[" * 200_000 + b"]" * 200_000
    _send(
        target,
        b"",
        struct.pack("!IQ", 64, 0)[:7],
        struct.pack("!IQ", 2**32 - 1, 2**63),
        struct.pack("!IQ", len(deep), 0) + deep,
        handshake.Client(Keys.made(), "store").hello[:9],
        b"GET / HTTP/1.1\r\n\r\n",
        target.random.randbytes(4096),
    )
    return _nothing


def without_secret(target: Target) -> Undo:
    """Well-formed messages that would end the job or join it, of one who does not know its secret."""
    frames = []
    for text in (b'{"op":"finish","status":1}', b'{"op":"join","pid":1,"workers":{}}', b'{"op":"list"}'):
        frames.append(wire.HEAD.pack(len(text), 0) + text)
    _send(target, *frames)
    return _nothing


def wrong_secret(target: Target) -> Undo:
    """The handshake with another secret, its proof guessed; and the same bytes once more."""
    said = [handshake.Client(Keys.made(), name).hello for name in ("store", "memory", "supervisor")]
    for _ in range(2):
        _send(target, *(hello + secrets.token_bytes(32) for hello in said))
    return _nothing


def _send(target: Target, *payloads: bytes) -> None:
    """Each on a connection of its own to every port; more than a handshake's answer must not come back."""
    ports = target.ports()
    if not ports:
        raise Impossible("no process of the run listens")
    for address in ports:
        for payload in payloads:
            with contextlib.suppress(OSError), socket.create_connection(address, ANSWER) as sock:
                sock.settimeout(ANSWER / 10)
                sock.sendall(payload)
                got = sock.recv(1 << 16)
                if len(got) > handshake.Client.ANSWER:
                    raise Answered(f"{address} answered a stranger with {len(got)} bytes")


class Answered(RuntimeError):
    """A stranger was told something."""
