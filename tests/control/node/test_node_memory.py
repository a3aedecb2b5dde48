"""Memory of another process: what was accessed, what goes away and comes back, from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.node import effects
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.control.node import MemoryActuator, MemoryModel, Pages, Schedule, run
from windtunnel.linux.processes import mappings
from windtunnel.store import eventlog

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="memory of other processes is moved by root"),
]
COUNT, SIZE = 4, 2 << 20
LOAD = f"""
import mmap, os, resource, sys, tempfile
file = tempfile.TemporaryFile(dir="/var/tmp")
file.truncate({COUNT * SIZE})
memory = mmap.mmap(file.fileno(), {COUNT * SIZE})
for part in range({COUNT}):
    memory[part * {SIZE}:(part + 1) * {SIZE}] = os.urandom({SIZE})
    if part % 2: memory.madvise(mmap.MADV_DONTDUMP, part * {SIZE}, {SIZE})
memory.flush()
print("ready", flush=True)
for line in sys.stdin:
    memory[int(line) * {SIZE}:(int(line) + 1) * {SIZE}:4096]
    print("read", flush=True)
"""


class Load:
    """A process with four regions of a file."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", LOAD], text=True, **pipes)
        assert self.process.stdout.readline() == "ready\n"
        self.pages = Pages(self.process.pid)
        mapped = [each for each in mappings(self.process.pid) if each.path.endswith("(deleted)")]
        self.regions = [self.pages._spans.index((each.start, each.end)) for each in mapped]

    def touch(self, region: int) -> None:
        print(region, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "read\n"

    def accessed(self) -> list[int]:
        scanned = self.pages.scan()
        return [number for number, place in enumerate(self.regions) if scanned[place]]


@pytest.fixture
def load() -> Iterator[Load]:
    load = Load()
    try:
        assert len(load.regions) == COUNT
        yield load
    finally:
        load.process.kill()
        load.process.communicate()


def test_a_scan_tells_which_regions_were_accessed_since_the_last(load: Load) -> None:
    assert load.accessed() == [0, 1, 2, 3]
    assert load.accessed() == []
    load.touch(2)
    assert load.accessed() == [2]
    load.touch(1)
    load.touch(3)
    assert load.accessed() == [1, 3]


def test_what_is_sent_away_leaves_memory_and_its_next_access_is_a_major_fault(load: Load) -> None:
    assert load.pages.remote() == 0.0
    assert load.pages.page_out([load.regions[1], load.regions[2]]) >= SIZE // 4096
    assert load.pages.remote() == 0.0
    load.touch(0)
    assert load.pages.remote() == 0.0  # that one stayed
    load.touch(1)
    assert load.pages.remote() > 0.0
    assert load.pages.bring_back() == 2 and load.pages.bring_back() == 0


def test_a_mapping_that_changed_counts_as_accessed_and_none_is_left_of_a_process_that_ended(
    load: Load,
) -> None:
    load.accessed()
    start, end = load.pages._spans[load.regions[0]]
    load.pages._spans[load.regions[0]] = (start, end - 4096)
    assert load.accessed() == [0]
    load.process.kill()
    load.process.wait()
    assert load.pages.scan() == () and load.pages.remote() == 0.0
    assert load.pages.page_out(load.regions) == 0 and load.pages.bring_back() == COUNT


def test_a_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="`pid` is 4194305, accepted is the id of a process"):
        Pages(4194305)


def test_an_agent_sends_cold_memory_away_and_has_it_read_again_at_its_end(load: Load, tmp_path: Path) -> None:
    log, schedule = tmp_path / "log", Schedule(0.02, 1, 2.0, 1.0, 0.02, 1.0, 0.1, 60.0)
    model = MemoryModel(load.pages, np.random.default_rng(0), patience=1.5, periods=(0.05, 0.1))
    with run(model, MemoryActuator(load.pages), schedule, log=log):

        def gone() -> bool:
            load.touch(0)
            return any(row["slow"] >= SIZE // 4096 for row in effects(log, "predict"))

        until(gone, "cold memory to go")
    decisions = [row["decision"] for row in eventlog.read(log) if row["kind"] == "decision"]
    cold = [set(each["cold"]) for each in decisions if each["is"] == "Scanned"]
    assert set(load.regions[1:]) <= cold[-1] and load.regions[0] not in cold[-1]
    values = [row["value"] for row in effects(log, "prediction")]
    assert all(row["value"] in values for row in effects(log, "predict"))
