"""Faults on real sandboxes: after each of them earlier checkpoints can be restored, nothing stands still,
nothing is left, and the fault is told in one sentence."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.hurt import COUNT, COUNTER, checked, fill, flip_manifest, frozen, small_disk, turn
from support.waiting import until
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import SandboxSpec, TurnClass
from windtunnel.linux.processes import in_vfork

pytestmark = pytest.mark.root


def test_a_pool_that_is_full_in_the_middle_of_a_checkpoint(new_home: Path) -> None:
    from windtunnel.agents.sandbox.host import SandboxHost

    with SandboxHost(new_home, pool_size=384 << 20) as host:
        box = host.create(SandboxSpec("a"))
        turn(box, f"{COUNTER}; echo good > /workspace/f; X=1")
        good = box.tip
        assert box.run(COUNT).stdout == b"1\n"
        root = host.context.pool.mount("a")
        filling = fill(root / "workspace")
        with pytest.raises(SandboxError, match="full"):
            for _ in range(50):
                box.checkpoint(full=True)
        assert frozen(new_home) == []
        assert box.info().status == "running"
        filling.unlink()
        line = until(lambda: _after_room(box))
        assert line.turn_class is TurnClass.FULL
        assert box.run(COUNT).stdout == b"2\n"
        checked(host)
        box.rollback(good)
        assert box.run(f"cat /workspace/f; echo $X; {COUNT}").stdout == b"good\n1\n1\n"
        checked(host)


def _after_room(box: Any) -> Any:
    """The next turn; btrfs gives room back only with its next transaction."""
    os.sync()
    try:
        return box.end_turn().wait()
    except SandboxError as error:
        assert "full" in str(error)
        return None


def test_a_full_disk_beside_the_pool(new_home: Path, small_root: Path) -> None:
    """Where process images and manifests are kept."""
    from windtunnel.agents.sandbox.host import SandboxHost

    with small_disk(new_home / "pages", "24m") as disk, SandboxHost(new_home) as host:
        box = host.create(SandboxSpec("a", image=str(small_root)))
        turn(box, f"{COUNTER}; echo good > /workspace/f; X=1")
        good = box.tip
        filling = fill(disk)
        box.run(f"{COUNT}; head -c 40000000 /dev/urandom > /dev/shm/big; echo more > /workspace/g")
        with pytest.raises(SandboxError, match=r"No space left|full") as raised:
            box.end_turn().wait(60)
        assert str(raised.value).startswith("checkpoint of sandbox a: ")
        assert box.info().status == "running" and frozen(new_home) == [] and box.tip == good
        filling.unlink()
        assert turn(box, "rm /dev/shm/big").turn_class is TurnClass.FULL
        newer = box.tip
        box.rollback(good)
        assert box.run(f"cat /workspace/*; echo $X; {COUNT}").stdout.endswith(b"good\n1\n1\n")
        box.rollback(newer)
        assert box.run(f"cat /workspace/g; {COUNT}").stdout == b"more\n2\n"
        checked(host)
        host.remove("a")


def test_damaged_manifests(new_home: Path, small_root: Path) -> None:
    """The host opens, the checkpoint before stands in for a damaged newest one, and what a manifest that
    cannot be read may need is kept."""
    from windtunnel.agents.sandbox.host import SandboxHost

    with SandboxHost(new_home) as host:
        box = host.create(SandboxSpec("a", image=str(small_root)))
        ids = []
        for number in (1, 2, 3):
            turn(box, f"X={number}; echo {number} > /workspace/f")
            ids.append(box.tip)
        host.create(SandboxSpec("b", image=str(small_root)))
        flip_manifest(host.context.store, ids[0])
        flip_manifest(host.context.store, ids[2], 0)
    events: list[Any] = []
    (new_home / "boxes" / "b" / "box.json").write_text("{")
    with SandboxHost(new_home, on_event=events.append) as host:
        problems = [event.detail for event in events if event.kind == "failed"]
        assert any(ids[0] in words for words in problems) and any(ids[2] in words for words in problems)
        box = host.get("a")
        assert box.tip == ids[1]
        with pytest.raises(Exception, match=ids[0]):
            box.rollback(ids[0])
        host.gc()
        assert {ids[0], ids[1], ids[2]} <= set(host.context.pool.snapshots())
        box.restore()
        assert box.run("echo $X; cat /workspace/f").stdout == b"2\n2\n"
        assert "b" not in {info.name for info in host.boxes()}
        host.create(SandboxSpec("b", image=str(small_root)))


def test_a_hanging_criu_is_ended(
    make: Callable[..., Any], host: Any, misbehaving: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make()
    turn(box, f"{COUNTER}; X=1")
    good = box.tip
    for bound in ("CRIU_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(f"windtunnel.agents.sandbox.criu.{bound}", 0.3)
    misbehaving("sleep 1000")
    box.run("X=2")
    with pytest.raises(IncompleteError, match="not complete after") as less:
        box.checkpoint(full=True)
    assert less.value.manifest is not None and less.value.manifest.image is None
    assert frozen(host.home.path) == [] and box.run("echo $X").stdout == b"2\n"
    with pytest.raises(IncompleteError, match="not complete after") as less:
        box.rollback(good)
    assert less.value.report is not None and less.value.report.lacks == less.value.lacks
    assert box.run("echo $X").stdout == b"2\n", "what ran is as it was"
    report = box.rollback(good, allow_less=True)
    assert [lack.kind for lack in report.lacks] == ["processes"]
    assert box.run("echo $X; cat /proc/sys/kernel/hostname").stdout.startswith(b"1\n")
    checked(host)


ODD = "import os, time; file = open('/workspace/big', 'wb'); file.write(bytes(70 << 20)); file.flush(); "
"""Holds a deleted file that is larger than what a dump takes in."""


def test_a_process_that_cannot_be_dumped(make: Callable[..., Any], host: Any, events: list[Any]) -> None:
    """Files and shells are kept, the error and the manifest say which process lacks and why; when it has
    ended, the next checkpoint is whole without anybody asking."""
    box = make(services={"web": "sleep 98765"})
    program = f"{ODD}os.unlink('/workspace/big'); open('/workspace/up', 'w').close(); time.sleep(1000)"
    box.put("/workspace/odd.py", program.encode())
    with pytest.raises(IncompleteError, match=r"odd\.py.*deleted file /workspace/big"):
        turn(
            box,
            "cd /tmp; X=1; python3 /workspace/odd.py </dev/null >/dev/null 2>&1 & "
            "until [ -e /workspace/up ]; do sleep 0.01; done",
        )
    line = box.log().turns[-1]
    assert (line.turn_class, line.required) == (TurnClass.FILES, TurnClass.FULL)
    manifest = host.context.store.load(box.tip)
    assert manifest.image is None and len(manifest.lacks) == 1 and "odd.py" in manifest.lacks[0].what
    # a turn that does nothing does not make a checkpoint without processes look whole; where nobody waits for
    # it, the next command says so, once
    box.run("true")
    box.end_turn()
    with pytest.raises(IncompleteError, match=r"odd\.py"):
        box.run("echo not run > /workspace/f")
    assert box.run("cat /workspace/f; echo run").stdout == b"run\n"
    assert box.log().turns[-1].required is TurnClass.FULL
    with pytest.raises(IncompleteError, match=r"odd\.py"):
        box.restore()
    assert box.info().status == "running" and "odd.py" in " ".join(box.info().processes)
    with pytest.raises(IncompleteError, match=r"odd\.py"):
        host.fork(manifest.id)
    (fork,) = host.fork(manifest.id, allow_less=True)
    assert fork.run("pwd; echo $X").stdout == b"/tmp\n1\n"
    report = box.restore(allow_less=True)
    assert report.lacks == manifest.lacks == box.info().lacks
    assert {"files", "state of shell main", "service web, started anew without its memory"} <= set(
        report.restored
    )
    assert box.run("pwd; echo $X; ls /workspace").stdout == b"/tmp\n1\nodd.py\nup\n"
    assert any("sleep 98765" in line for line in box.info().processes)
    turn(box, "true")
    manifest = host.context.store.load(box.tip)
    assert manifest.image is not None and "sleep 98765" in " ".join(manifest.image.processes)
    assert manifest.lacks == () == box.info().lacks
    checked(host)


def test_turns_that_hurt_their_shell(make: Callable[..., Any]) -> None:
    box = make()
    turn(box, "X=1; echo 1 > /workspace/f")
    good = box.tip
    closes = 'for n in {0..255}; do eval "exec $n>&-"; done'
    for command, ended in (("kill -9 $$", "shell-died"), (closes, None), ("kill -STOP $$", "timeout")):
        result = box.run(command, timeout=1 if ended == "timeout" else 60)
        assert ended is None or result.ended == ended, result
        box.end_turn().wait(60)
        kept = box.tip
        box.restore()
        assert box.run("cat /workspace/f", timeout=60).stdout == b"1\n"
        assert box.tip == kept
    box.rollback(good)
    assert box.run("cat /workspace/f; echo $X").stdout == b"1\n1\n"


def test_init_killed_in_a_turn(make: Callable[..., Any], host: Any, events: list[Any]) -> None:
    box = make()
    turn(box, f"{COUNTER}; X=1")
    import threading

    def kill() -> None:
        until(lambda: b"sleep 4321" in _commands(box))
        os.kill(box.machine().pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = box.run("echo begun; sleep 4321", timeout=60)
    killer.join()
    assert result.ended == "sandbox-died" and result.exit_code is None
    assert any(event.kind == "died" for event in events)
    with pytest.raises(SandboxDied):
        box.run("true")
    with pytest.raises(SandboxDied):
        box.end_turn()
    box.restore()
    assert box.run(f"echo $X; {COUNT}").stdout == b"1\n1\n"
    checked(host)


def _commands(box: Any) -> bytes:
    return " ".join(box.info().processes).encode()


VFORKS = """
import ctypes, os, time
call = ctypes.CDLL(None).syscall
while True:
    # CLONE_VFORK without CLONE_VM: as vfork(2), but the child may do what it likes
    if call(56, 0x4011, 0, 0, 0, 0) == 0:
        time.sleep({child})
        os._exit(0)
    time.sleep(0.02)
"""


def test_a_process_that_waits_for_its_child_of_vfork(host: Any, events: list[Any]) -> None:
    """It counts as frozen, and CRIU cannot stop it."""
    box = host.create(SandboxSpec("births"))
    try:
        start = "python3 -c {} </dev/null >/dev/null 2>&1 &"
        box.run(start.format(shlex.quote(VFORKS.format(child=0.02))))
        for _ in range(3):
            assert box.checkpoint(full=True).turn_class is TurnClass.FULL
        assert not [event for event in events if event.kind == "failed"]
        box.run("kill %1")
        box.run(start.format(shlex.quote(VFORKS.format(child=1000))))
        until(lambda: any(in_vfork(pid) for pid in box.machine().cgroup.pids()))
        with pytest.raises(IncompleteError, match="a child of vfork"):
            box.checkpoint(full=True)
        assert len(box.info().processes) >= 4
    finally:
        host.remove("births")
