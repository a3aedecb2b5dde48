"""Which losses of several hosts at once do checkpoints in memory survive (GEMINI, section 4)?

Three answers side by side. The paper's formula, a lower bound by the union of the fatal losses; the exact
probability (`policy.probability`), held against every choice of hosts; and real kills: memory services
that hold real shards are killed, k at once with their memory, and the newest step is read back from the rest.
`Hosts` are such services as processes, without trainers, and their control plane.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.harness.rows import Row
from benchmarks.training.checkpoint.harness import PROGRAMS, SOURCE, Failed
from windtunnel.base import keys
from windtunnel.training import cleanup
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.slot import CopyError, Slot, checksum_of
from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.placement import Kind, copy_sets, place, survives
from windtunnel.training.checkpoint.policy.probability import (
    enumerate_recovery,
    recovery,
)
from windtunnel.training.elastic.model import MemberHost, Membership

row = partial(Row, "placement")
PLACES, COPIES = 8, 2  # of the real kills
SHARD = 64 << 10  # bytes
SEED = 20230923
RACKS = tuple(f"rack{at // 4}" for at in range(16))
LAYOUT = b'{"bench": "placement"}'
DIGEST = xxhash.xxh3_128_hexdigest(LAYOUT)
PATIENCE = 30.0  # seconds
KINDS: tuple[Kind, ...] = ("group", "ring", "mixed", "domains")


def union_bound(places: int, copies: int, lost: int) -> float:
    """The paper's corollary 1 for placement "group", in [0, 1]."""
    if lost < copies:
        return 1.0
    fatal = places / copies * math.comb(places - copies, lost - copies) / math.comb(places, lost)
    return max(0.0, 1.0 - fatal)


def placement_rows(quick: bool) -> Iterator[Row]:
    """The rows of this section."""
    yield from _published()
    yield from _mixed()
    yield from _racks()
    yield from _killed(quick)


def _exact(name: str, placement: Placement, lost: int, **fields: object) -> Row:
    found = recovery(placement, lost).exact
    agrees = found == enumerate_recovery(placement, lost)
    value = 100 * float(found) if found is not None else None
    target = "exact: as every choice counted"
    return row(name, "%", emulated=value, target=target, met=agrees, **fields)  # type: ignore[arg-type]


def _published() -> Iterator[Row]:
    for lost in (2, 3, 4):
        yield _exact(
            f"16 hosts, 2 copies, {lost} lost: group, recovered from memory",
            place(16, 2, "group"),
            lost,
            published=100 * union_bound(16, 2, lost),
            source=f"{SOURCE}: the formula of corollary 1, evaluated here",
            note="the published formula is a lower bound, exact below twice as many as there are copies",
        )
        yield _exact(f"16 hosts, 2 copies, {lost} lost: ring", place(16, 2, "ring"), lost)


def _mixed() -> Iterator[Row]:
    places, copies = 7, 2
    placement = place(places, copies, "mixed")
    fewest = -(-places // copies)
    gap = 100 * (len(copy_sets(placement)) - fewest) / math.comb(places, copies)
    bound = 100 * (2 * copies - 3) / math.comb(places, copies)
    yield row(
        f"{places} hosts, {copies} copies, {copies} lost: mixed, distance from any placement's best",
        "%",
        emulated=gap,
        published=bound,
        source=f"{SOURCE}: (2m - 3) / C(N, m) at most, evaluated here",
        target="at most as published",
        met=gap <= bound + 1e-9,
        note=f"{len(copy_sets(placement))} copy sets, no placement has fewer than {fewest}",
    )


def _racks() -> Iterator[Row]:
    for lost in (1, 2):
        for kind in KINDS:
            placement = place(16, 2, kind, RACKS if kind == "domains" else ())
            yield row(
                f"16 hosts in 4 racks, 2 copies, {lost} of the racks lost: {kind}",
                "%",
                emulated=100 * recovery(placement, lost, RACKS).value,
                target="100 % for one rack" if kind == "domains" and lost == 1 else "",
                met=recovery(placement, lost, RACKS).value == 1.0
                if kind == "domains" and lost == 1
                else None,
            )


def trials(lost: int, quick: bool) -> list[tuple[int, ...]]:
    """Which hosts are killed: every choice of two, a sample of larger ones."""
    every = list(combinations(range(PLACES), lost))
    draw = random.Random(SEED + lost)
    if quick:
        return draw.sample(every, 5)
    return every if lost == 2 else draw.sample(every, 24)


def _killed(quick: bool) -> Iterator[Row]:
    plan: list[tuple[Kind, int]] = [("group", 2), ("group", 3), ("group", 4), ("ring", 2)]
    with Hosts(PLACES, SHARD) as hosts:
        for kind, lost in plan[:2] if quick else plan:
            placement = place(PLACES, COPIES, kind)
            chosen = trials(lost, quick)
            recovered = expected = agreed = 0
            for gone in chosen:
                hosts.save(COPIES, kind)
                hosts.kill(gone)
                found, said = hosts.readable(), survives(placement, gone)
                recovered, expected, agreed = recovered + found, expected + said, agreed + (found == said)
            every = len(chosen) == math.comb(PLACES, lost)
            yield row(
                f"{PLACES} memory services, {COPIES} copies, {lost} killed and wiped: {kind}, step read back",
                "%",
                measured=100 * recovered / len(chosen),
                emulated=100 * recovery(placement, lost).value,
                target="each kill ends as the placement says",
                met=agreed == len(chosen),
                note=f"{recovered} of {len(chosen)} kills survived, {expected} should "
                + ("(every choice)" if every else f"(a sample of {math.comb(PLACES, lost)} choices)"),
            )


class MemoryHost:
    """One process. ``posted`` gets what it posts, from a thread."""

    def __init__(self, host: int, folder: Path, posted: Any) -> None:
        self.host, self.folder = host, folder
        secret = folder.parent / keys.NAME
        command = [sys.executable, str(PROGRAMS / "memory_host.py"), str(folder), str(secret)]
        env = {**os.environ, cleanup.TOKEN: folder.parent.name}
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed("a memory service did not start")
        self.address, self.path = json.loads(line)
        self.ready = threading.Event()
        self._posted = posted
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, *told: Any) -> None:
        """One line; a host that is gone does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(told) + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and its memory is lost."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if told[0] == "ready":
                self.ready.set()
            else:
                self._posted(*told[1:])


class Hosts:
    """``count`` hosts of one rank each. A context manager: at its end all is gone.

    It decides a key when all ranks posted it, saves steps as the ranks of a job do, kills services with their
    memory, and reads back what is left, over the network.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._folder = cleanup.claim(f"windtunnel-bench-{secrets.token_hex(4)}")
        keys.Keys.made().write(self._folder / keys.NAME)
        self._lock = threading.Lock()
        self._posts: dict[str, dict[int, Any]] = {}
        self._next = self._generation = 0
        self._ranks: list[LocalMemory] = []
        self._slots: list[list[Slot]] = []
        self._hosts: list[MemoryHost] = []
        self.step = -1
        try:
            self._hosts = [self._start() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def save(self, copies: int, kind: str, domains: Sequence[str] = ()) -> None:
        """A new generation of all hosts, those that were killed replaced, saves a step with ``copies``
        copies placed as ``kind`` says; returns when it is committed.

        Raises:
            Failed: it was not.
        """
        self._hosts = [m if m.process.poll() is None else self._start() for m in self._hosts]
        self._form()
        self.step += 1
        placement = {"kind": kind, "domains": list(domains) or None}
        threads = [
            threading.Thread(target=self._save, args=(rank, copies, placement))
            for rank in range(len(self._hosts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for memory in self._ranks:
            if not memory.wait_committed(self.step, PATIENCE):
                raise Failed(f"step {self.step} is not committed after {PATIENCE:g} s")

    def kill(self, places: Collection[int]) -> None:
        """These hosts are gone, with their memory."""
        for at in places:
            self._hosts[at].kill()

    def readable(self) -> bool:
        """Whether every shard of the newest step can be read from a host that is left, and is right."""
        left = [at for at, m in enumerate(self._hosts) if m.process.poll() is None]
        held = {at: self._ranks[at].copies() for at in left}
        reader = self._ranks[left[0]]
        into = memoryview(bytearray(self._nbytes))
        for rank in range(len(self._hosts)):
            shard = f"rank{rank}"
            for at in left:
                if not any((copy.shard, copy.step) == (shard, self.step) for copy in held[at]):
                    continue
                with contextlib.suppress(OSError, CopyError):
                    reader.fetch(self._hosts[at].address, shard, self.step, into)
                    if bytes(into) == _content(rank, self.step, self._nbytes):
                        break
            else:
                return False
        return True

    def close(self) -> None:
        """End all processes, remove all memory."""
        self._let_go()
        for host in self._hosts:
            host.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> MemoryHost:
        host, self._next = self._next, self._next + 1
        return MemoryHost(host, self._folder / f"host{host}", self._posted)

    def _form(self) -> None:
        self._let_go()
        self._generation += 1
        hosts = tuple(MemberHost(host.host, "127.0.0.1", host.address) for host in self._hosts)
        membership = Membership(self._generation, 1, hosts, 1, "", "bench")
        with self._lock:
            self._posts = {}
        for at, host in enumerate(self._hosts):
            host.ready.clear()
            host.tell("membership", membership.plain(), at)
        for host in self._hosts:
            if not host.ready.wait(PATIENCE):
                raise Failed("a memory service does not answer")
        self._ranks = [
            LocalMemory(host.path, rank, self._generation, PATIENCE) for rank, host in enumerate(self._hosts)
        ]
        self._slots = [[] for _ in self._hosts]

    def _let_go(self) -> None:
        for slots in self._slots:
            for slot in slots:
                slot.close()
        for memory in self._ranks:
            memory.close()
        self._slots, self._ranks = [], []

    def _save(self, rank: int, copies: int, placement: dict[str, Any]) -> None:
        memory, shard = self._ranks[rank], f"rank{rank}"
        memory.restored(self.step - 1, 1)
        slots = memory.reserve(LAYOUT, {shard: self._nbytes}, copies=copies, placement=placement)[shard]
        self._slots[rank] = slots
        index = self.step % len(slots)
        about: dict[str, Any] = {"world": len(self._hosts), "generation": self._generation}
        slots[index].begin(self.step, nbytes=self._nbytes, has_shared=False, layout=DIGEST, **about)
        data = slots[index].data
        data[:] = _content(rank, self.step, self._nbytes)
        slots[index].complete(checksum_of(data))
        memory.saved(shard, index, self.step)

    def _posted(self, key: str, rank: int, value: Any) -> None:
        with self._lock:
            if key.rpartition("/")[2] != f"{self._generation}.1":
                return
            values = self._posts.setdefault(key, {})
            values[rank] = value
            if len(values) < len(self._hosts):
                return
        for host in self._hosts:
            host.tell("decided", key, values)


def _content(rank: int, step: int, nbytes: int) -> bytes:
    """What a shard consists of at a step: different everywhere."""
    seed = f"{rank}/{step}/".encode()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]
