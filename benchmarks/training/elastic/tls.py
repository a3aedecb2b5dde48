"""What it costs a checkpoint that hosts speak over TLS: with it and without, in turn.

Two memory services in this process take the checkpoints of two ranks, each a copy of the other's; a step
counts from the first save until it is committed.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import xxhash

from benchmarks.harness.measure import conditions, in_turn
from benchmarks.harness.rows import Row, left_out
from windtunnel.base.keys import Keys
from windtunnel.base.tls import Certificates
from windtunnel.training import cleanup
from windtunnel.training.checkpoint.live.memory import LocalMemory, MemoryService
from windtunnel.training.checkpoint.live.slot import Slot, checksum_of
from windtunnel.training.elastic.model import MemberHost, Membership

SECTION = "tls"
row = partial(Row, SECTION)
MIB, QUICK_MIB = 64, 8
STEPS, QUICK_STEPS = 20, 5
LAYOUT = b"{}"
PATIENCE = 60.0


class Pair:
    """Two hosts of one rank each; ``post`` decides as a supervisor does."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        self._posts: dict[str, dict[int, Any]] = {}
        self._lock = threading.Lock()
        self.services = [
            MemoryService(folder / f"host{at}", "127.0.0.1", keys=keys, context=self) for at in range(2)
        ]
        hosts = tuple(MemberHost(at, "127.0.0.1", one.address) for at, one in enumerate(self.services))
        for at, service in enumerate(self.services):
            service.membership(Membership(1, 1, hosts, 1, "", "bench"), at)
        self.ranks = [LocalMemory(one.path, at, 1) for at, one in enumerate(self.services)]
        self.slots: list[list[Slot]] = []

    def post(self, key: str, rank: int, value: Any) -> None:
        with self._lock:
            values = self._posts.setdefault(key, {})
            values[rank] = value
            if len(values) < 2:
                return
        for service in self.services:
            service.decided(key, values)

    def event(self, kind: str, **fields: Any) -> None: ...

    def reserve(self, nbytes: int) -> None:
        self.slots = [
            memory.reserve(LAYOUT, {f"rank{at}": nbytes})[f"rank{at}"] for at, memory in enumerate(self.ranks)
        ]

    def save(self, step: int) -> float:
        """Seconds from the first save until ``step`` is committed; writing the state is not in it.

        Raises:
            TimeoutError: it is not.
        """
        digest = xxhash.xxh3_128_hexdigest(LAYOUT)
        for at, slots in enumerate(self.slots):
            slot = slots[step % 2]
            nbytes = slot.capacity
            slot.begin(step, nbytes=nbytes, world=2, has_shared=False, generation=1, layout=digest)
            with slot.data as data:
                data[:8] = (step * 2 + at).to_bytes(8, "little")
                slot.complete(checksum_of(data))
        begun = time.perf_counter()
        for at, memory in enumerate(self.ranks):
            memory.saved(f"rank{at}", step % 2, step)
        if not all(memory.wait_committed(step, PATIENCE) for memory in self.ranks):
            raise TimeoutError(f"step {step} is not committed after {PATIENCE:g} s")
        return time.perf_counter() - begun

    def close(self) -> None:
        for memory in self.ranks:
            memory.close()
        for slots in self.slots:
            for slot in slots:
                slot.close()
        for service in self.services:
            service.close(wipe=True)


def tls_rows(quick: bool) -> Iterator[Row]:
    keys, mib, steps = Keys.made(), QUICK_MIB if quick else MIB, QUICK_STEPS if quick else STEPS
    if shutil.which("openssl") is None:
        yield left_out(SECTION, "TLS", "the openssl command is not installed, which makes the certificate")
        return
    folder = cleanup.claim(f"windtunnel-bench-{secrets.token_hex(4)}")
    try:
        certificates = _self_signed(folder)
        with contextlib.ExitStack() as stack:
            arms = {}
            for name, used in (("plain", keys), ("tls", replace(keys, tls=certificates))):
                pair = stack.enter_context(contextlib.closing(Pair(folder / name, used)))
                pair.reserve(mib << 20)
                arms[name] = partial(_next, pair, iter(range(steps)))
            found = in_turn(arms, steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (plain, tls), (plain_cpu, tls_cpu) = (
        (median(one[at] for one in found[name]) for name in ("plain", "tls")) for at in (0, 1)
    )
    yield row(
        "a checkpoint of two ranks over TLS", "s", measured=tls,
        note=f"median of {steps}, {mib} MiB a rank, a copy each, in turn with {1e3 * plain:.1f} ms without;"
        f" {conditions()}",
    )  # fmt: skip
    yield row(
        "… of it TLS", "%", measured=100 * (tls - plain) / tls,
        note=f"{1e3 * (tls_cpu - plain_cpu):.0f} ms of CPU more than {1e3 * plain_cpu:.0f} in both hosts",
    )  # fmt: skip


def _next(pair: Pair, steps: Iterator[int]) -> tuple[float, float]:
    """Seconds of the next checkpoint, and of CPU in all threads."""
    begun = time.process_time()
    return pair.save(next(steps)), time.process_time() - begun


def _self_signed(folder: Path) -> Certificates:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=bench -days 2"
    command = ["openssl", *words.split(), "-keyout", "key", "-out", "cert"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Certificates.load([str(folder / name) for name in ("cert", "key", "cert")])
