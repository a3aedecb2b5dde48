"""Processes are killed again and again while a client writes: nothing that was acknowledged is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from windtunnel.base.keys import Keys
from windtunnel.data.files.check import check
from windtunnel.data.files.live import host as live
from windtunnel.data.files.live.client import FileClient
from windtunnel.data.files.live.host import HostProcesses
from windtunnel.data.files.log import LogRing
from windtunnel.data.files.model import LEAST_RING, FilesError, FilesHostSpec, OperationKind, Status

BLOCK = 5000
SPEC = FilesHostSpec("", "", "", "", least=2, ring=LEAST_RING)


class Writer(threading.Thread):
    """Writes numbered blocks; ``acknowledged``: how many are synced. Ends with `stop`, or with an
    ``error``."""

    def __init__(self, files: FileClient, first: int = 0) -> None:
        super().__init__()
        self.files, self.written, self.acknowledged = files, first, first
        self.error: Exception | None = None
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                for _ in range(3):
                    self.files.write("/file", self.written * BLOCK, block(self.written))
                    self.written += 1
                self.files.sync()
                self.acknowledged = self.written
        except Exception as error:
            self.error = error

    def until(self, blocks: int) -> None:
        end = time.monotonic() + 120
        while self.acknowledged < blocks and self.error is None:
            assert time.monotonic() < end, "the writer does not get on"
            time.sleep(0.01)
        assert self.error is None, self.error

    def stop(self) -> None:
        self.stopped.set()
        self.join()


def block(number: int) -> bytes:
    return Random(number).randbytes(BLOCK // 2) + bytes(BLOCK // 2)


def intact(files: FileClient, blocks: int) -> None:
    for number in range(blocks):
        assert files.read("/file", number * BLOCK, BLOCK) == block(number), number


def alike(folder: Path) -> None:
    """Three hosts that have ended have the same names and contents."""
    contents = [check(folder / f"host{number}") for number in range(3)]
    assert contents[0].digests == contents[1].digests == contents[2].digests


@contextlib.contextmanager
def revived(hosts: list[HostProcesses]) -> Iterator[None]:
    """What ends is started again, as `files serve` does."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for host in hosts:
                host.revive()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(900)
def test_forty_kills_of_any_process_lose_nothing(tmp_path: Path) -> None:
    random = Random(27)
    with live.hosts(tmp_path, 3, SPEC) as hosts, contextlib.closing(live.client(tmp_path, 90.0)) as files:
        live.complete(files, 3, 120.0)
        files.perform(OperationKind.CREATE, "/file")
        with revived(hosts):
            writer = Writer(files)
            for number in range(40):
                writer.until(writer.acknowledged + random.randint(1, 9))
                victim = hosts[random.randrange(3)]
                part = ("nic", "server", "engine", "")[number % 4]
                pids = victim.pids("nic")[1:] if part == "engine" else victim.pids(part or None)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                writer.until(writer.acknowledged + 1)
                if not part:  # a host has to be back before the next one goes
                    live.complete(files, 3, 120.0)
            writer.stop()
            intact(files, writer.acknowledged)
            live.complete(files, 3, 120.0)
            files.sync()
        for host in hosts:
            host.stop()
    alike(tmp_path)


def test_a_primary_that_stands_still_is_replaced_and_changes_nothing_later(tmp_path: Path) -> None:
    with live.hosts(tmp_path, 3, SPEC) as hosts, contextlib.closing(live.client(tmp_path, 90.0)) as files:
        live.complete(files, 3, 120.0)
        files.perform(OperationKind.CREATE, "/file")
        writer = Writer(files)
        writer.until(3)
        (primary,) = (row for row in files.status() if isinstance(row, Status) and row.leads)
        frozen = next(host for host in hosts if host.spec.name == primary.name)
        frozen.signal(signal.SIGSTOP, "server")
        writer.until(writer.acknowledged + 6)  # by another one: this one does not go on
        frozen.signal(signal.SIGCONT, "server")
        writer.stop()
        intact(files, writer.acknowledged)
        live.complete(files, 3, 120.0)
        files.sync()
        for host in hosts:
            host.stop()
    alike(tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("fusermount3") or not os.path.exists("/dev/fuse"), reason="needs FUSE")
def test_ten_power_cuts_of_all_hosts_on_disks_that_forget(tmp_path: Path) -> None:
    from support.lossy import Disk  # needs FUSE to be imported

    random = Random(10)
    secret = tmp_path / "secret"
    Keys.new().write(secret)
    acknowledged, opened = (
        0,
        [Disk(tmp_path / f"disk{number}", tmp_path / f"m{number}") for number in range(2)],
    )
    try:
        for cut in range(10):
            common = replace(SPEC, store=str(tmp_path / "store"), secret=str(secret), copies=2)
            hosts = [
                HostProcesses(
                    replace(
                        common,
                        name=f"h{n}",
                        folder=str(disk.mountpoint / "host"),
                        listen=f"127.0.0.1:{30000 + cut * 10 + n * 3}",
                    )
                )
                for n, disk in enumerate(opened)
            ]
            files = FileClient(common.store, Keys.read(secret).secret, 90.0)
            live.complete(files, 2, 120.0)
            if not cut:
                files.perform(OperationKind.CREATE, "/file")
            intact(files, acknowledged)
            writer = Writer(files, acknowledged)
            writer.until(acknowledged + random.randint(3, 60))
            for host in hosts:
                host.kill()
            acknowledged = writer.acknowledged
            writer.stopped.set()
            files._timeout = 0.0
            writer.join()
            acknowledged = writer.acknowledged
            files.close()
            for number, disk in enumerate(opened):
                disk.cut()
                opened[number] = Disk(disk.folder, disk.mountpoint)
    finally:
        for disk in opened:
            disk.close()


def test_a_full_disk_on_one_host_stalls_and_says_so(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small disk is mounted, which needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=True)
    try:
        secret = tmp_path / "secret"
        Keys.new().write(secret)
        common = replace(SPEC, store=str(tmp_path / "store"), secret=str(secret), copies=2)
        folders = [tmp_path / "large", small / "host"]
        hosts = [
            HostProcesses(replace(common, name=f"h{n}", folder=str(folder)))
            for n, folder in enumerate(folders)
        ]
        files = FileClient(common.store, Keys.read(secret).secret, 10.0)
        try:
            live.complete(files, 2, 120.0)
            files.perform(OperationKind.CREATE, "/file")
            with pytest.raises(FilesError):
                for number in range(2000):
                    files.write("/file", number * BLOCK, block(number))
            rows: list[Any] = [row for row in files.status() if isinstance(row, Status)]
            assert any("h1: " in row.stalled and "No space left" in row.stalled for row in rows), rows
        finally:
            files.close()
            for host in hosts:
                host.kill()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_flipped_bit_in_the_log_is_never_read_as_an_operation(tmp_path: Path) -> None:
    with live.hosts(tmp_path, 1, replace(SPEC, least=1)) as (host,):
        files = live.client(tmp_path)
        live.complete(files, 1)
        files.perform(OperationKind.CREATE, "/file")
        files.write("/file", 0, block(0))
        files.write("/file", BLOCK, block(1))
        files.sync()
        host.kill()
        files.close()
    folder = tmp_path / "host0"
    whole = check(folder)
    ring = LogRing(folder / "ring", LEAST_RING)
    place = ring.read(0, LEAST_RING).index(block(1)[:64]) + 100
    ring.write(place, bytes([ring.read(place, 1)[0] ^ 4]))
    ring.close()
    damaged = check(folder)
    assert damaged.position.sequence in (whole.position.sequence - 1, whole.position.sequence)
    if damaged.logged:
        assert damaged.position.sequence == whole.position.sequence - 1
