"""What retention and collections keep, and that nothing is left on the machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.hurt import COUNT, COUNTER, checked, traces, turn
from support.waiting import until
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.machine.group import Cgroup
from windtunnel.agents.sandbox.machine.launch import Guard
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home

pytestmark = pytest.mark.root


def test_a_criu_that_was_left_behind_does_not_hold_up_a_host_that_closes(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.path.mkdir(exist_ok=True)
    words = ["--freeze-cgroup", str(Cgroup(home.tag, "gone").path)]
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *words])
    Guard(home).close()
    assert left.wait(30) == -signal.SIGKILL


SHOW = "echo $X; cat /workspace/f"
SETUP = f"{COUNTER}; X=1; echo 1 > /workspace/f"


def test_nothing_is_left_of_a_home(own_home: Path) -> None:
    with SandboxHost(own_home) as host:
        box = host.create(SandboxSpec("a", network="egress"))
        turn(box, SETUP)
        host.fork("a", 2)
        assert traces(own_home)
        (own_home / "boxes" / "stray").mkdir()
        stray = ("folder of sandbox stray",)
        assert host.gc(dry_run=True).leftovers == stray == host.gc().leftovers
        for info in host.boxes():
            host.remove(info.name)
        checked(host)
    assert until(lambda: not traces(own_home)), traces(own_home)


def test_retention_never_loses_a_part(own_home: Path) -> None:
    """Three are kept of each sandbox, with turns, forks and rollbacks in between; what is labelled, pinned or
    forked from stays, and a collection tells beforehand what it will do."""
    with SandboxHost(own_home, retention=3) as host:
        box = host.create(SandboxSpec("a"))
        turn(box, f"{COUNTER}; X=0; echo 0 > /workspace/f")
        labelled = box.checkpoint(label="start").id
        pinned = ""
        fork = None
        for number in range(1, 11):
            command = f"X={number}" if number % 3 == 0 else f"X={number}; echo {number} > /workspace/f"
            turn(box, command if number % 4 else f"{command}; {COUNT}")
            if number == 5:
                pinned = box.checkpoint(pin=True).id
                (fork,) = host.fork(box.tip)
            if number == 7:
                box.rollback(pinned)
        newest = [manifest.id for manifest in box.log().checkpoints if manifest.box == "a"][-3:]
        dry = host.gc(dry_run=True)
        before = {manifest.id for manifest in host.context.store.all()[0]}
        done = host.gc()
        after = {manifest.id for manifest in host.context.store.all()[0]}
        assert set(dry.checkpoints) == set(done.checkpoints) == before - after
        assert {labelled, pinned, box.tip, *newest} <= after
        assert fork is not None
        box.rollback(newest[0])
        assert box.run("echo $X").stdout == b"8\n"
        box.rollback(newest[2])
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"10\n10\n3\n"
        box.rollback(labelled)
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"0\n0\n1\n"
        box.rollback(pinned)
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"5\n5\n2\n"
        host.remove("a")
        fork.restore()
        assert fork.run(f"{SHOW}; {COUNT}").stdout == b"5\n5\n2\n"
        checked(host)


def test_a_collection_spares_what_is_being_made(
    make: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that begins and ends in the middle of a collection keeps all of its parts."""
    box = make()
    turn(box, f"{COUNTER}; X=1")
    pool = type(host.context.pool)
    unclaimed = pool.unclaimed

    def late(self: Any, *given: Any) -> Any:
        box.run("X=2; echo 2 > /workspace/f")
        box.checkpoint(full=True)
        return unclaimed(self, *given)

    monkeypatch.setattr(pool, "unclaimed", late)
    host.gc()
    monkeypatch.undo()
    box.restore()
    assert box.run(f"{SHOW}; {COUNT}").stdout == b"2\n2\n1\n"
    checked(host)
