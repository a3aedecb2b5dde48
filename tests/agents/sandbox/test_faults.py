"""Faults on real sandboxes: after each of them earlier checkpoints can be restored, nothing stands still,
nothing is left, and the fault is told in one sentence."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hurt import COUNT, COUNTER, checked, fill, flip_image, flip_manifest, frozen, small_disk, wrapped_criu

from support.waiting import until
from windtunnel.agents.sandbox.errors import LessError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import Limits, SandboxSpec, TurnClass
from windtunnel.linux.processes import in_vfork

pytestmark = pytest.mark.root


def turn(box: Any, command: str) -> Any:
    result = box.run(command, timeout=60)
    assert result.ended == "exit" and result.exit_code == 0, result
    return box.end_turn().wait(60)


@pytest.fixture
def events(host: Any) -> Iterator[list[Any]]:
    """What the shared host reports during a test."""
    seen: list[Any] = []
    before, host._on_event = host._on_event, seen.append
    yield seen
    host._on_event = before


# --- full disks ----------------------------------------------------------------------------------------


def test_a_pool_that_is_full_in_the_middle_of_a_checkpoint(own_home: Path) -> None:
    from windtunnel.agents.sandbox.host import Host

    with Host(own_home, pool_size=384 << 20) as host:
        box = host.create(SandboxSpec("a"))
        turn(box, f"{COUNTER}; echo good > /workspace/f; X=1")
        good = box.tip
        assert box.run(COUNT).stdout == b"1\n"
        root = host.context.pool.mount("a")
        filling = fill(root / "workspace")
        with pytest.raises(SandboxError, match="full"):
            for _ in range(50):
                box.checkpoint(full=True)
        assert frozen(own_home) == []
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


def test_a_full_disk_beside_the_pool(own_home: Path) -> None:
    """Where process images and manifests are kept."""
    from windtunnel.agents.sandbox.host import Host

    with small_disk(own_home / "pages", "24m") as disk, Host(own_home) as host:
        box = host.create(SandboxSpec("a"))
        turn(box, f"{COUNTER}; echo good > /workspace/f; X=1")
        good = box.tip
        filling = fill(disk)
        box.run(f"{COUNT}; head -c 40000000 /dev/urandom > /dev/shm/big; echo more > /workspace/g")
        with pytest.raises(SandboxError, match=r"No space left|full") as told:
            box.end_turn().wait(60)
        assert str(told.value).startswith("checkpoint of sandbox a: ")
        assert box.info().status == "running" and frozen(own_home) == [] and box.tip == good
        filling.unlink()
        assert turn(box, "rm /dev/shm/big").turn_class is TurnClass.FULL
        newer = box.tip
        box.rollback(good)
        assert box.run(f"cat /workspace/*; echo $X; {COUNT}").stdout.endswith(b"good\n1\n1\n")
        box.rollback(newer)
        assert box.run(f"cat /workspace/g; {COUNT}").stdout == b"more\n2\n"
        checked(host)
        host.remove("a")


# --- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.1, 0.5, 0.95])
def test_a_damaged_process_image(own_home: Path, at: float) -> None:
    from windtunnel.agents.sandbox.host import Host

    with Host(own_home) as host:
        box = host.create(SandboxSpec("a"))
        turn(box, f"{COUNTER}; X=1")
        good = box.tip
        turn(box, f"{COUNT}; X=2; head -c 300000 /dev/urandom > /dev/shm/random")
        bad = box.tip
        flip_image(host.context.store, bad, at)
    with Host(own_home) as host:
        box = host.get("a")
        assert box.info().status == "running"
        with pytest.raises(SandboxError, match=f"{bad}.*{good}"):
            box.restore()
        assert box.run("echo $X").stdout == b"2\n", "what ran is as it was"
        box.restore(good)
        assert box.run(f"echo $X; {COUNT}").stdout == b"1\n1\n"
        turn(box, "X=3")
        host.gc()
        assert frozen(own_home) == []


def test_damaged_manifests(own_home: Path) -> None:
    """The host opens, the checkpoint before stands in for a damaged newest one, and what a manifest that
    cannot be read may need is kept."""
    from windtunnel.agents.sandbox.host import Host

    with Host(own_home) as host:
        box = host.create(SandboxSpec("a"))
        ids = []
        for number in (1, 2, 3):
            turn(box, f"X={number}; echo {number} > /workspace/f")
            ids.append(box.tip)
        host.create(SandboxSpec("b"))
        flip_manifest(host.context.store, ids[0])
        flip_manifest(host.context.store, ids[2], 0)
    seen: list[Any] = []
    (own_home / "boxes" / "b" / "box.json").write_text("{")
    with Host(own_home, on_event=seen.append) as host:
        problems = [event.detail for event in seen if event.kind == "failed"]
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
        host.create(SandboxSpec("b"))


# --- CRIU ----------------------------------------------------------------------------------------------


@pytest.fixture
def misbehaving(host: Any, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """From the call on, the host's CRIU runs some lines of shell first; it is itself again after the test."""
    parts, real = host.context, host.context.criu

    def misbehave(lines: str) -> None:
        path = wrapped_criu(tmp_path, real.path, lines)
        object.__setattr__(parts, "criu", type(real)(path, real.version))

    yield misbehave
    object.__setattr__(parts, "criu", real)


def test_criu_killed_in_the_middle_of_a_dump(
    make: Callable[..., Any], host: Any, events: list[Any], misbehaving: Callable[[str], None]
) -> None:
    """The checkpoint holds files and shells, which is an error; the next one is whole again."""
    box = make()
    turn(box, f"{COUNTER}; X=1")
    good = box.tip
    for _ in range(30):
        events.clear()
        misbehaving('setsid sleep 0.02 & $real "$@" & c=$!; sleep 0.005; kill -9 $c; kill -9 $$')
        try:
            turn(box, f"X=2; echo 2 > /workspace/f; {COUNT}")
        except LessError as error:
            assert "count.sh" in str(error)
            break
        except SandboxError as error:
            # it was in the midst of changing the first process, with which the sandbox ends: that is told,
            # too, and what was good is not lost
            assert "the sandbox died meanwhile" in str(error)
            object.__setattr__(
                host.context, "criu", type(host.context.criu)(_real(), host.context.criu.version)
            )
            box.rollback(good)
    else:
        pytest.fail("no dump was struck beside the first process")
    manifest = host.context.store.load(box.tip)
    assert manifest.files is not None and manifest.image is None
    assert manifest.kept == ("files", "state of shell main")
    assert {lack.kind for lack in manifest.lacks} == {"processes"}
    refused = [event for event in events if "no image of the processes" in event.detail]
    assert len(refused) == 2, "it was tried once more"
    assert frozen(host.home.path) == [] and box.info().status == "running"
    object.__setattr__(host.context, "criu", type(host.context.criu)(_real(), host.context.criu.version))
    # CRIU may have left a trap in the shell: that is told, and it is started anew with its state
    first = box.run("true", timeout=60)
    assert first.ended == "exit" or "SIGTRAP" in first.note
    line = turn(box, "true")
    assert (line.turn_class is TurnClass.FULL and "holds no process image" in line.reasons[0]) or line.reasons
    assert host.context.store.load(box.tip).image is not None
    assert box.run(COUNT).stdout == b"2\n"
    box.rollback(good)
    assert box.run(f"echo $X; {COUNT}").stdout == b"1\n1\n"
    checked(host)


PAIR = """
import socket, time
heard = socket.create_server(("127.0.0.1", 7000))
near = socket.create_connection(heard.getsockname())
far, _ = heard.accept()
open("/workspace/ready", "w").close()
time.sleep(1000)
"""


def test_criu_killed_while_it_reads_a_connection(
    make: Callable[..., Any], misbehaving: Callable[[str], None], tmp_path: Path
) -> None:
    """Until it is whole again a read from it fails, so it may be given up long after the next dump."""
    box = make()
    box.run(f"python3 -c {shlex.quote(PAIR)} </dev/null >/dev/null 2>&1 &")
    until(lambda: any(entry.name == "ready" for entry in box.listdir("/workspace")))
    kill = tmp_path / "kill"
    kill.write_text(f"""#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] && mkdir {tmp_path}/once && kill -9 $PPID
exit 0
""")
    kill.chmod(0o755)
    misbehaving(f'[ "$1" = dump ] && exec $real "$@" --action-script {kill}')
    with pytest.raises(LessError, match="may have broken") as told:
        box.checkpoint(full=True)
    assert told.value.manifest.image is not None and (tmp_path / "once").exists()
    assert [lack.kind for lack in told.value.manifest.lacks] == ["sockets", "sockets"]
    assert box.checkpoint(full=True).lacks == ()


def _real() -> Path:
    from windtunnel.agents.sandbox.criu.program import find_criu

    found = find_criu()
    assert found is not None
    return found.path


@pytest.mark.parametrize("victim", ["service", "shell", "init"])
def test_a_process_that_a_failed_dump_lost_is_told(
    make: Callable[..., Any], host: Any, events: list[Any], misbehaving: Callable[[str], None], victim: str
) -> None:
    box = make()
    turn(box, f"{COUNTER}; X=1; echo 1 > /workspace/f")
    good = box.tip
    machine = box.machine()
    shell = machine.shells()["main"]
    service = next(iter(machine.cgroup.pids() - {machine.pid, shell}))
    pid = {"service": service, "shell": shell, "init": machine.pid}[victim]
    misbehaving(f"kill -9 {pid}; kill -9 $$")
    box.run("echo 2 > /workspace/f")
    if victim == "init":
        with pytest.raises(SandboxError, match="died"):
            box.checkpoint(full=True)
        until(lambda: box.info().status == "dead")
        with pytest.raises(SandboxDied, match="restore"):
            box.run("true")
    else:
        with contextlib.suppress(LessError) if victim == "shell" else pytest.raises(LessError) as less:
            box.checkpoint(full=True)
        if victim == "service":
            assert "a dump that failed ended it" in str(less.value)
        told = [event.detail for event in events if event.kind == "failed"]
        assert any("ended by the failed dump" in words for words in told), told
    assert frozen(host.home.path) == []
    misbehaving("")
    box.restore(allow_less=True)
    assert box.run("cat /workspace/f; echo $X").stdout == (b"1\n1\n" if victim == "init" else b"2\n1\n")
    box.rollback(good)
    assert box.run(f"cat /workspace/f; echo $X; {COUNT}").stdout == b"1\n1\n1\n"
    checked(host)


def test_a_hanging_criu_is_ended(
    make: Callable[..., Any], host: Any, misbehaving: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windtunnel.agents.sandbox.criu import Criu

    box = make()
    turn(box, f"{COUNTER}; X=1")
    good, dump, restore = box.tip, Criu.dump, Criu.restore
    monkeypatch.setattr(Criu, "dump", lambda *a, **k: dump(*a, **{**k, "timeout": 0.3}))
    monkeypatch.setattr("windtunnel.agents.sandbox.criu.GRACE_SECONDS", 0.3)
    misbehaving("sleep 1000")
    box.run("X=2")
    with pytest.raises(LessError, match="not complete after") as less:
        box.checkpoint(full=True)
    assert less.value.manifest is not None and less.value.manifest.image is None
    assert frozen(host.home.path) == [] and box.run("echo $X").stdout == b"2\n"
    monkeypatch.setattr(Criu, "restore", lambda *a, **k: restore(*a, **{**k, "timeout": 0.3}))
    with pytest.raises(LessError, match="not complete after") as less:
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
    with pytest.raises(LessError, match=r"odd\.py.*deleted file /workspace/big"):
        turn(
            box,
            "cd /tmp; X=1; python3 /workspace/odd.py </dev/null >/dev/null 2>&1 & "
            "until [ -e /workspace/up ]; do sleep 0.01; done",
        )
    line = box.log().turns[-1]
    assert (line.turn_class, line.wanted) == (TurnClass.FILES, TurnClass.FULL)
    manifest = host.context.store.load(box.tip)
    assert manifest.image is None and len(manifest.lacks) == 1 and "odd.py" in manifest.lacks[0].what
    # a turn that does nothing does not make a checkpoint without processes look whole; where nobody waits for
    # it, the next command says so, once
    box.run("true")
    box.end_turn()
    with pytest.raises(LessError, match=r"odd\.py"):
        box.run("echo not run > /workspace/f")
    assert box.run("cat /workspace/f; echo run").stdout == b"run\n"
    assert box.log().turns[-1].wanted is TurnClass.FULL
    with pytest.raises(LessError, match=r"odd\.py"):
        box.restore()
    assert box.info().status == "running" and "odd.py" in " ".join(box.info().processes)
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


# --- commands that hurt --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("kill -9 $$", "shell-died"),
        ("exit 3", "exit"),
        (
            'for n in {0..255}; do eval "exec $n>&-"; done',
            None,
        ),
        ("exec sleep 0.01", None),
        ("trap '' TERM INT HUP; set -e; false", None),
        ("kill -STOP $$", "timeout"),
    ],
)
def test_a_turn_that_hurts_its_shell(
    make: Callable[..., Any], host: Any, command: str, ended: str | None
) -> None:
    box = make()
    turn(box, "X=1; echo 1 > /workspace/f")
    good = box.tip
    result = box.run(command, timeout=1 if ended == "timeout" else 60)
    assert ended is None or result.ended == ended, result
    box.end_turn().wait(60)
    assert box.run("cat /workspace/f", timeout=60).stdout == b"1\n"
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


def test_a_fork_bomb_and_a_memory_hog(make: Callable[..., Any], host: Any) -> None:
    box = make(limits=Limits(memory=256 << 20, pids=60))
    turn(box, "X=1; echo 1 > /workspace/f")
    result = box.run("bomb() { bomb | bomb & }; bomb", timeout=3)
    box.run("kill $(jobs -p)", timeout=3)
    assert result.ended in ("exit", "timeout", "shell-died")
    hog = box.run("python3 -c 'x = bytearray(1 << 30)'; echo $?", timeout=60)
    assert hog.ended in ("exit", "shell-died", "timeout", "sandbox-died")
    box.restore()
    assert box.run("cat /workspace/f; echo $X", timeout=60).stdout == b"1\n1\n"
    turn(box, "echo 2 > /workspace/f")
    checked(host)


def test_large_sparse_deleted_and_shared(make: Callable[..., Any], host: Any) -> None:
    """A 10 GB sparse file, a 200 MB real one, a deleted file that is still open, and a full /dev/shm."""
    box = make(limits=Limits(memory=None))
    turn(
        box,
        "truncate -s 10G /workspace/sparse; head -c 200M /dev/zero | tr '\\0' x > /workspace/real; "
        "exec 9<> /workspace/gone; echo held >&9; rm /workspace/gone",
    )
    turn(box, "head -c 30M /dev/urandom > /dev/shm/a; sum=$(md5sum < /dev/shm/a)")
    manifest = host.context.store.load(box.tip)
    assert manifest.image is not None, manifest.lacks
    box.restore()
    shown = box.run(
        "stat -c %s /workspace/sparse /workspace/real; tail -c 3 /workspace/real; echo; "
        'head -n 1 < /proc/self/fd/9; [ "$sum" = "$(md5sum < /dev/shm/a)" ] && echo same'
    ).stdout
    assert shown == b"10737418240\n209715200\nxxx\nheld\nsame\n"
    box.run("cat /dev/zero > /dev/shm/full")
    box.checkpoint()
    assert box.run("echo alive").stdout == b"alive\n"
    box.run("rm -f /dev/shm/*")
    turn(box, "true")
    checked(host)


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
        with pytest.raises(LessError, match="a child of vfork"):
            box.checkpoint(full=True)
        assert len(box.info().processes) >= 4
    finally:
        host.remove("births")
