"""Hosts of one rank each that are only memory services, as processes, without trainers; and their control
plane. They save steps as the ranks of a job do, are killed with their memory, and what is left is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.harness.jobs import Failed
from windtunnel.base import keys
from windtunnel.training import cleanup
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.memory.messages import Reservation
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile, checksum_of
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.checkpoint.policy.placement import Kind
from windtunnel.training.elastic.model import MemberHost, Membership

PROGRAM = Path(__file__).with_name("memory_host.py")
LAYOUT = b'{"bench": "placement"}'
DIGEST = xxhash.xxh3_128_hexdigest(LAYOUT)
PATIENCE = 30.0  # seconds


class MemoryHost:
    """One process. ``posted`` gets what it posts, from a thread."""

    def __init__(self, host: int, folder: Path, posted: Any) -> None:
        self.host, self.folder = host, folder
        secret = folder.parent / keys.NAME
        command = [sys.executable, str(PROGRAM), str(folder), str(secret)]
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

    def tell(self, *message: Any) -> None:
        """One line; a host that is gone does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and its memory is lost."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if message[0] == "ready":
                self.ready.set()
            else:
                self._posted(*message[1:])


class Hosts:
    """``count`` hosts of one rank each. A context manager: at its end all is gone.

    It decides a key when all ranks posted it, saves steps as the ranks of a job do, kills services with their
    memory, and reads back what is left, over the network.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._folder = cleanup.claim(f"windtunnel-bench-{secrets.token_hex(4)}")
        keys.Keys.new().write(self._folder / keys.NAME)
        self._lock = threading.Lock()
        self._posts: dict[str, dict[int, Any]] = {}
        self._next = self._generation = 0
        self._ranks: list[LocalMemory] = []
        self._slots: list[list[SlotFile]] = []
        self._hosts: list[MemoryHost] = []
        self.step = -1
        try:
            self._hosts = [self._start() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def save(self, copies: int, kind: Kind) -> None:
        """A new generation of all hosts, those that were killed replaced, saves a step with ``copies``
        copies placed as ``kind`` says; returns when it is committed.

        Raises:
            Failed: it was not.
        """
        self._hosts = [m if m.process.poll() is None else self._start() for m in self._hosts]
        self._form()
        self.step += 1
        threads = [
            threading.Thread(target=self._save, args=(rank, copies, kind)) for rank in range(len(self._hosts))
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
                if not any((copy.shard.name, copy.shard.step) == (shard, self.step) for copy in held[at]):
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
        membership = Membership(self._generation, 1, hosts, 1, "bench")
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

    def _save(self, rank: int, copies: int, kind: Kind) -> None:
        memory, shard = self._ranks[rank], f"rank{rank}"
        memory.restored(self.step - 1, 1)
        slots = memory.reserve(Reservation(shard, self._nbytes, DIGEST, copies, kind), LAYOUT)
        self._slots[rank] = slots
        index = self.step % len(slots)
        world = len(self._hosts)
        slots[index].begin(Shard(shard, self.step, world, False, self._generation, DIGEST, self._nbytes))
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
