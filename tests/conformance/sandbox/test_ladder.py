"""Every rung below the best: what a checkpoint says that it covers is true, and a restore brings exactly that
back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.hurt import COUNT, COUNTER, checked, turn
from support.waiting import until
from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.files import Pool
from windtunnel.agents.sandbox.model import SandboxSpec, TurnClass

pytestmark = pytest.mark.root

TURNS = [
    ("true", TurnClass.NONE),
    ("X=1", TurnClass.SHELL),
    ("echo 1 > /workspace/f", TurnClass.FILES),
    (COUNTER, TurnClass.FULL),
    ("rm /workspace/f; echo 2 > /workspace/g", TurnClass.FILES),
    (COUNT, TurnClass.FULL),
    ("chmod 600 /workspace/g; mv /workspace/g /workspace/h", TurnClass.FILES),
    ("X=2; greet() { echo hello; }; cd /workspace", TurnClass.SHELL),
]
"""Turns with the weakest class that loses nothing of them."""
SHOW = "echo $X; greet; pwd; ls; cat h; stat -c %a h"
SHOWN = b"2\nhello\n/workspace\ncount.sh\nh\n2\n600\n"


def dies(box: Any) -> None:
    box.machine().cgroup.kill()
    until(lambda: box.info().status == "dead")


@pytest.mark.parametrize(
    ("criu", "pool", "no_ebpf"),
    [
        (True, "btrfs", "this kernel has no BTF"),
        (True, "copy", "this kernel has no BTF"),
        (False, "copy", "this kernel has no BTF"),
    ],
)
def test_a_rung(
    new_home: Path, small_root: Path, criu: bool, pool: str, no_ebpf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windtunnel.agents.sandbox import host as hosts

    if pool == "copy":
        monkeypatch.setattr(hosts, "open_pool", lambda folder, size: Pool(folder))
    if no_ebpf:
        monkeypatch.setattr(hosts.kernel, "missing", lambda: no_ebpf)
    if not criu:
        monkeypatch.setattr(hosts, "find_criu", lambda: None)
    services = {"web": "sleep 98765"}
    with hosts.SandboxHost(new_home) as host:
        box = host.create(SandboxSpec("a", image=str(small_root), services=services, allow_less=not criu))
        for command, weakest in TURNS:
            line = turn(box, command)
            assert line.required >= weakest, (command, line)
            assert line.turn_class >= min(weakest, TurnClass.FULL if criu else TurnClass.FILES), line
            # the declared service and the shell lack nothing, the counter does
            lacking = ["bash /workspace/count.sh" in str(lack) for lack in line.lacks]
            assert lacking == ([True] if not criu and counts(box) and line.turn_class else []), line
        manifest = host.context.store.load(box.tip)
        assert manifest.files is not None and manifest.files.kind == pool
        assert manifest.restorable[0] == "files" and manifest.restorable[-1] == "state of shell main"
        if criu:
            assert manifest.restorable[1].endswith("processes with memory and open files")
            assert manifest.lacks == ()
        else:
            assert len(manifest.restorable) == 2
            assert [(lack.kind, lack.why) for lack in manifest.lacks] == [("processes", "CRIU is missing")]
        dies(box)
        report = box.restore()
        assert box.run(SHOW).stdout == SHOWN
        assert any("sleep 98765" in line for line in box.info().processes)
        if criu:
            assert manifest.restorable[1] in report.restored
            assert report.lacks == ()
            assert box.run(COUNT).stdout == b"2\n"
        else:
            assert set(report.restored) == {
                "files",
                "state of shell main",
                "service web, started anew without its memory",
            }
            assert report.lacks == manifest.lacks
            assert not any("count.sh" in line for line in box.info().processes)
        turn(box, "X=3")
        dies(box)
        box.restore()
        assert box.run("echo $X").stdout == b"3\n"
        (fork,) = host.fork("a")
        assert fork.run("echo $X; cat h").stdout == b"3\n2\n"
        box.rollback(manifest.id)
        assert box.run(SHOW).stdout == SHOWN
        checked(host)


def test_down_the_ladder_and_up_again(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU goes away and comes back while the sandbox runs."""
    from windtunnel.agents.sandbox.host import SandboxHost

    with SandboxHost(own_home) as host:
        box = host.create(SandboxSpec("a"))
        turn(box, f"{COUNTER}; X=1")
        whole = box.tip
    monkeypatch.setattr("windtunnel.agents.sandbox.host.find_criu", lambda: None)
    with SandboxHost(own_home) as host:
        box = host.get("a")
        assert box.run(COUNT).stdout == b"1\n"
        for command in ("X=2", "X=3"):
            box.run(command)
            with pytest.raises(IncompleteError, match=r"count\.sh.*CRIU is missing"):
                box.end_turn().wait(60)
            line = box.log().turns[-1]
            assert (line.required, line.turn_class) == (TurnClass.FULL, TurnClass.FILES), line
            weak = host.context.store.load(box.tip)
            assert weak.image is None and len(weak.lacks) == 1
    monkeypatch.undo()
    with SandboxHost(own_home) as host:
        box = host.get("a")
        assert box.run(COUNT).stdout == b"2\n"
        assert turn(box, "true").turn_class is TurnClass.FULL
        manifest = host.context.store.load(box.tip)
        assert manifest.image is not None and manifest.lacks == ()
        dies(box)
        box.restore()
        assert box.run(f"echo $X; {COUNT}").stdout == b"3\n3\n"
        with pytest.raises(IncompleteError, match=r"count\.sh"):
            box.rollback(weak.id)
        assert box.run(COUNT).stdout == b"4\n", "what ran was left alone"
        report = box.rollback(weak.id, allow_less=True)
        assert report.lacks == weak.lacks
        assert box.run("echo $X").stdout == b"3\n"
        # what runs now is not the image's: the next turn has to keep it
        turn(box, COUNTER)
        assert host.context.store.load(box.tip).image is not None
        box.rollback(whole)
        assert box.run(f"echo $X; {COUNT}").stdout == b"1\n1\n"
        checked(host)


def counts(box: Any) -> bool:
    return any("count.sh" in line for line in box.info().processes)
