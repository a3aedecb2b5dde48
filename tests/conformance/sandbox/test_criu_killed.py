"""CRIU is killed in the middle, or kills: the checkpoint says what it lacks, and the next one is whole."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.hurt import COUNT, COUNTER, checked, frozen, turn
from support.waiting import until
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import TurnClass

pytestmark = pytest.mark.root


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
        except IncompleteError as error:
            assert "count.sh" in str(error)
            break
        except SandboxError as error:
            # it was in the midst of changing the first process, with which the sandbox ends: that is told,
            # too, and what was good is not lost
            assert "the sandbox died meanwhile" in str(error)
            misbehaving("")
            box.rollback(good)
    else:
        pytest.fail("no dump was struck beside the first process")
    manifest = host.context.store.load(box.tip)
    assert manifest.files is not None and manifest.image is None
    assert manifest.restorable == ("files", "state of shell main")
    assert {lack.kind for lack in manifest.lacks} == {"processes"}
    refused = [event for event in events if "no image of the processes" in event.detail]
    assert len(refused) == 2, "it was tried once more"
    assert frozen(host.home.path) == [] and box.info().status == "running"
    misbehaving("")
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
server = socket.create_server(("127.0.0.1", 7000))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
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
    with pytest.raises(IncompleteError, match="may have broken") as raised:
        box.checkpoint(full=True)
    assert raised.value.manifest.image is not None and (tmp_path / "once").exists()
    assert [lack.kind for lack in raised.value.manifest.lacks] == ["sockets", "sockets"]
    assert box.checkpoint(full=True).lacks == ()


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
        with pytest.raises(IncompleteError, match="a dump that failed ended it"):
            box.checkpoint(full=True)
        details = [event.detail for event in events if event.kind == "failed"]
        assert any("ended by the failed dump" in words for words in details), details
    assert frozen(host.home.path) == []
    misbehaving("")
    box.restore(allow_less=True)
    assert box.run("cat /workspace/f; echo $X").stdout == (b"1\n1\n" if victim == "init" else b"2\n1\n")
    box.rollback(good)
    assert box.run(f"cat /workspace/f; echo $X; {COUNT}").stdout == b"1\n1\n1\n"
    checked(host)
