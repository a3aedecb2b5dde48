"""A file from one rack to seven on this machine: splitters and relays, and what does without them over TCP.

All arms are in turn on the same racks, whose ports are token buckets of one rate: unicast after unicast, a
binomial tree, a chain that passes on what has come, and gloo's broadcast. All times are from the word to the
source until the last rack has the last byte. Ports have jumbo frames, TCP too.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.measure import in_turn, spread
from benchmarks.harness.rows import Row, figure, need
from windtunnel.linux import network
from windtunnel.network.multicast.live.rack import PAYLOAD, serve
from windtunnel.network.multicast.live.racks import Message, Racks, address
from windtunnel.network.multicast.live.send import send
from windtunnel.network.multicast.planning import fabric_of
from windtunnel.network.multicast.policy import decide
from windtunnel.network.multicast.policy.shuffle import Shuffle
from windtunnel.network.multicast.twin import MulticastWorld, splitters

SHUFFLE, RATE, PORT, PART = Shuffle(2, 2), 12.5e6, 7200, 1 << 16
SIZES, LOSSES, SHORT = {"256 KiB": 1 << 18, "4 MiB": 4 << 20}, (0.01, 0.05, 0.2), 0.95
SENDERS = {
    "unicast": {0: [1, 2, 3, 4, 5, 6, 7]},
    "binomial": {0: [4, 2, 1], 4: [6, 5], 2: [3], 6: [7]},
    "chain": {rack: [rack + 1] for rack in range(7)},
}
TARGETS = {"unicast": ">= 5x", "binomial": ">= 2x", "chain": "about 1x"}


def live_rows(quick: bool) -> Iterator[Row]:
    """Every arm, small and large; then losses."""
    need(network.missing())
    import torch.distributed  # noqa: F401 - once, before the racks are forked

    racks = Racks(SHUFFLE, RATE, _part)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, size in SIZES.items():
                yield from _compared(racks, Path(folder), name, size, 2 if quick else 5)
            for loss in LOSSES[-1:] if quick else LOSSES:
                file = _file(Path(folder), 1 << 21)
                found = [send(racks, file, loss=loss, seed=seed) for seed in range(2 if quick else 5)]
                same = all(one["same"] for run in found for rack, one in run.racks.items() if rack)
                taken = spread(run.seconds * 1e3 for run in found)
                yield figure(
                    f"8 racks, 2 MiB, each loses {loss:.0%} of what comes", "ms", taken.median,
                    "every rack has it, digest equal", met=same, note=f"worst {taken.p95:.0f} ms",
                )  # fmt: skip
    finally:
        racks.close()


def _compared(racks: Racks, folder: Path, name: str, size: int, repeats: int) -> Iterator[Row]:
    file = _file(folder, size)
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        "splitters": lambda: _sent(racks, lambda: send(racks, file).seconds)
    }
    for number, arm in enumerate(SENDERS, 10 * list(SIZES).index(name)):
        told = {"port": PORT + number, "senders": SENDERS[arm], "size": size, "through": arm == "chain"}
        _all(racks, {"op": "join", **told})
        arms[arm] = partial(_sent, racks, partial(_all, racks, {"op": "pass", **told}))
    _all(racks, {"op": "gloo", "size": size})  # joins, and warms up
    arms["gloo"] = partial(_sent, racks, partial(_all, racks, {"op": "gloo", "size": size}))
    for arm_ in arms.values():
        arm_()
    psutil.cpu_percent()
    found = in_turn(arms, repeats)
    busy = psutil.cpu_percent() / 100
    short = f"; SHORT OF CPU ({busy:.0%} busy): not counted" if busy > SHORT else f"; CPUs {busy:.0%} busy"
    seen = fabric_of(SHUFFLE, [0], size)
    own = spread(seconds for seconds, _ in found["splitters"])
    emulated = splitters(seen, decide(seen), MulticastWorld(RATE, 0.0, PAYLOAD)).seconds
    yield figure(
        f"8 racks, {name} at 100 Mb/s: splitters", "ms", own.median * 1e3, emulated=emulated * 1e3,
        note=f"worst {own.p95 * 1e3:.0f} ms; {_bytes(found['splitters'])}{short}",
    )  # fmt: skip
    for arm in (*SENDERS, "gloo"):
        gains = [other / mine for (other, _), (mine, _) in zip(found[arm], found["splitters"], strict=True)]
        goal = TARGETS.get(arm, "") if name == "4 MiB" else ""
        yield figure(
            f"8 racks, {name}: splitters over {arm}", "x", spread(gains).median, goal,
            judged=goal.startswith(">") and busy <= SHORT,
            note=f"{arm} {spread(seconds for seconds, _ in found[arm]).median * 1e3:.0f} ms;"
            f" {min(gains):.2f} to {max(gains):.2f}x; {_bytes(found[arm])}{short}",
        )  # fmt: skip


def _bytes(found: list[tuple[float, float]]) -> str:
    return f"{spread(nbytes for _, nbytes in found).median / 1e6:.2f} MB sent by all racks"


def _file(folder: Path, size: int) -> Path:
    file = folder / str(size)
    file.write_bytes(os.urandom(size))
    return file


def _sent(racks: Racks, work: Callable[[], float]) -> tuple[float, float]:
    """Seconds, and bytes that all racks sent meanwhile."""
    before = _counted(racks)
    return work(), _counted(racks) - before


def _counted(racks: Racks) -> float:
    total = 0
    for rack in range(SHUFFLE.racks):
        for line in Path(f"/proc/{racks.pid(rack)}/net/dev").read_text().splitlines():
            name, _, counts = line.strip().partition(":")
            total += int(counts.split()[8]) if name in ("tx", network.INTERFACE) else 0
    return total


def _all(racks: Racks, message: Message) -> float:
    """Tell every rack, the source last; seconds from then until the last has done it.

    Raises:
        RuntimeError: a rack is gone.
    """
    for rack in range(1, SHUFFLE.racks):
        racks.tell(rack, message)
    began = time.monotonic()
    racks.tell(0, message)
    ends = [racks.hear(rack) for rack in range(SHUFFLE.racks)]
    if None in ends:
        raise RuntimeError(f"{message['op']}: rack {ends.index(None)} has ended")
    return max(float(one["at"]) for one in ends if one) - began


def _part(rack: int, control: socket.socket) -> None:
    """A rack of the bench: besides multicasts it passes on by TCP and by gloo."""
    joined: dict[int, tuple[socket.socket | None, list[socket.socket]]] = {}  # by port: from whom, to whom
    tensors: dict[int, Any] = {}  # by size

    def join(told: Message) -> Message:
        senders: dict[str, list[int]] = told["senders"]
        fed = any(rack in to for to in senders.values())
        with socket.create_server(("", told["port"])) as listener:
            down = [_connected((address(to), told["port"])) for to in senders.get(str(rack), [])]
            joined[told["port"]] = (listener.accept()[0] if fed else None, down)
        return {"at": time.monotonic()}

    def forward(told: Message) -> Message:
        up, down = joined[told["port"]]
        room, at = memoryview(bytearray(told["size"])), 0
        while up is not None and at < len(room):
            came = up.recv_into(room[at : at + PART])
            if told["through"]:
                for one in down:
                    one.sendall(room[at : at + came])
            at += came
        end = time.monotonic()
        if up is None or not told["through"]:
            for one in down:
                one.sendall(room)
        return {"at": end}

    def gloo(told: Message) -> Message:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        if not tensors:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
            limit = timedelta(seconds=60)
            store = TCPStore(address(0), PORT - 1, SHUFFLE.racks, rack == 0, timeout=limit)
            dist.init_process_group("gloo", store=store, rank=rack, world_size=SHUFFLE.racks)
        dist.broadcast(tensors.setdefault(told["size"], torch.zeros(told["size"], dtype=torch.uint8)), 0)
        return {"at": time.monotonic()}

    serve(rack, control, {"join": join, "pass": forward, "gloo": gloo})


def _connected(to: tuple[str, int]) -> socket.socket:
    last = time.monotonic() + 30
    while time.monotonic() < last:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(to, timeout=30)
        time.sleep(0.005)  # it does not listen yet
    raise TimeoutError(f"nobody listens at {to}")
