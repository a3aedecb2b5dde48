"""Real sandboxes end to end: run, classify, checkpoint, die, come back, fork, roll back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import preloaded
from support.waiting import until
from windtunnel.agents.sandbox import host as sandbox_host
from windtunnel.agents.sandbox.errors import CriuError, IncompleteError, MachineError, SandboxError
from windtunnel.agents.sandbox.files import btrfs
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.inspect import kernel, memory
from windtunnel.agents.sandbox.machine import Machine, launch
from windtunnel.agents.sandbox.machine.group import Cgroup
from windtunnel.agents.sandbox.machine.launch import unclaimed
from windtunnel.agents.sandbox.model import SandboxSpec, Saved, TurnClass, TurnRecord
from windtunnel.base.errors import UserError

pytestmark = pytest.mark.root

SERVER = """cat > /workspace/server.py <<'END'
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    served = 0
    def do_GET(self):
        Handler.served += 1
        self.send_response(200); self.end_headers(); self.wfile.write(str(Handler.served).encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(('127.0.0.1', 8000), Handler)
open('/workspace/ready', 'w').close()
server.serve_forever()
END
python3 /workspace/server.py >/dev/null 2>&1 </dev/null &
until [ -e /workspace/ready ]; do sleep 0.01; done"""
SLEEP = "sleep 1000 </dev/null >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done"
ASK = "exec 5<>/dev/tcp/127.0.0.1/8000; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&5; tail -n 1 <&5; exec 5>&-"


def kill_all(box: Any) -> None:
    """Every process of the sandbox dies at once, as on a host that is taken away."""
    box.machine().cgroup.kill()
    until(lambda: box.info().status != "running")


def turn(box: Any, command: str) -> tuple[bytes, TurnRecord]:
    result = box.run(command, timeout=60)
    assert result.ended == "exit", result
    return result.stdout, box.end_turn().wait(60)


def kept(box: Any, command: str) -> tuple[str, tuple[str, ...]]:
    """The class of a turn and the reasons for it."""
    line = turn(box, command)[1]
    return line.turn_class.word, line.reasons


@pytest.mark.parametrize(
    ("before", "command", "expected"),
    [
        ("", "ls / >/dev/null; cat /etc/passwd >/dev/null", "none"),
        ("", "t=$(mktemp); echo x > $t; rm $t; unset t", "none"),
        ("", "grep -r root /etc >/dev/null 2>&1; python3 -Bc 'print(sum(range(10)))'", "none"),
        ("cd /tmp; cd /workspace", "cd /tmp; cd /workspace", "none"),
        ("", "export MODE=debug", "shell"),
        ("", "greet() { echo hello; }; alias ll='ls -l'; set -o noclobber", "shell"),
        ("export MODE=debug", "unset MODE", "shell"),
        ("", "echo one > /workspace/a", "files"),
        ("echo one > /workspace/a", "rm /workspace/a", "files"),
        ("echo one > /workspace/a", "mv /workspace/a /workspace/b; cd /tmp", "files"),
        ("", SLEEP, "full"),
        (SLEEP, "kill %1; wait %1 2>/dev/null", "full"),
        ("", "exec 9> /workspace/log", "full"),
        (SERVER, ASK, "full"),
        (SERVER, "cat /workspace/ready", "none"),
        (SERVER, "rm /workspace/ready", "files"),
        ("exec 9> /workspace/log", "echo more >> /workspace/log", "full"),
        ("exec 9>> /workspace/log", "bash -c 'echo more >> /workspace/log'", "files"),
        (SLEEP, "export A=1", "shell"),
        ("exec 9> /workspace/log", "cd /workspace", "shell"),
        ("mkdir /tmp/d; (cd /tmp/d; sleep 100 </dev/null >/dev/null 2>&1 &)", "rmdir /tmp/d", "full"),
    ],
)
def test_class_of_a_turn(make: Callable[..., Any], before: str, command: str, expected: str) -> None:
    box = make()
    if before:
        turn(box, before)
    word, reasons = kept(box, command)
    assert word == expected, reasons


def test_everything_comes_back_after_the_death_of_every_process(make: Callable[..., Any]) -> None:
    box = make()
    turn(box, SERVER)
    assert turn(box, ASK)[0] == b"1"
    turn(box, "cd /workspace; greet() { echo hello $1; }; export MODE=debug; alias ll='ls -l'")
    turn(box, "echo kept > kept; rm ready")
    kill_all(box)
    assert box.info().status == "dead"
    report = box.restore()
    assert box.info().status == "running"
    assert report.lacks == ()
    assert box.run("pwd; greet you; echo $MODE; cat kept; ls").stdout.split() == (
        b"/workspace hello you debug kept kept server.py".split()
    )
    assert box.run(ASK).stdout == b"2"


def test_a_shell_with_jobs_and_descriptors_comes_back_with_a_newer_state(make: Callable[..., Any]) -> None:
    box = make()
    turn(box, f"{SLEEP}; exec 9> /workspace/log; echo one >&9")
    assert kept(box, "A=1; cd /workspace")[0] == "shell"
    kill_all(box)
    box.restore()
    assert box.run("echo $A $PWD; jobs; echo two >&9; cat log").stdout.split() == (
        b"1 /workspace [1]+ Running sleep 1000 < /dev/null > /dev/null 2>&1 & one two".split()
    )


def test_a_death_in_the_middle_of_a_turn_loses_that_turn_only(make: Callable[..., Any]) -> None:
    box = make()
    turn(box, "echo safe > /workspace/a")
    box.run("echo half > /workspace/b")
    kill_all(box)
    box.restore()
    assert box.run("cat /workspace/*").stdout == b"safe\n"


def test_rollback_takes_files_memory_and_shell_back_and_forth(make: Callable[..., Any]) -> None:
    box = make()
    turn(box, SERVER)
    points = []
    for number in range(1, 4):
        done, _ = turn(box, f"{ASK}; echo {number} > /workspace/n; N={number}")
        assert done == str(number).encode()
        points.append(box.tip)
    for at in (0, 2, 1):
        box.rollback(points[at])
        assert box.run("cat /workspace/n; echo $N").stdout == f"{at + 1}\n{at + 1}\n".encode()
        assert box.run(ASK).stdout == str(at + 2).encode()


def test_a_restore_that_fails_leaves_what_runs_as_it_was(
    host: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make()
    box.run(f"{SLEEP}; echo first > /workspace/f")
    first = box.checkpoint().id
    box.run("echo second > /workspace/f; X=2")

    def refuse(*_: object, **__: object) -> int:
        raise CriuError("process restore: it cannot be")

    before = box.info()
    with monkeypatch.context() as patched:
        patched.setattr(type(host.context.criu), "restore", refuse)
        with pytest.raises(
            IncompleteError, match=f"sandbox {box.name}, as restored from {first}, lacks sleep"
        ):
            box.rollback(first)
    assert (box.info().pid, box.info().processes) == (before.pid, before.processes)
    assert box.run("cat /workspace/f; echo $X").stdout == b"second\n2\n"
    assert not unclaimed(host.home, {info.name for info in host.boxes()})
    box.rollback(first)
    assert box.run("cat /workspace/f").stdout == b"first\n" and box.info().pid != before.pid


def test_forks_go_their_own_ways(host: Any, make: Callable[..., Any]) -> None:
    box = make()
    turn(box, SERVER)
    turn(box, f"{ASK}; A=1; echo base > /workspace/f")
    with pytest.raises(UserError, match="name 'X' is not accepted"):
        host.fork(box.name, 2, name="X")
    forks = host.fork(box.name, 2)
    (named,) = host.fork(box.name, name=f"{box.name}-own")
    assert [fork.name for fork in (*forks, named)] == [f"{box.name}-{end}" for end in ("1", "2", "own")]
    forks.append(named)
    names = set()
    for number, fork in enumerate(forks):
        assert fork.run("echo $A; cat /workspace/f").stdout == b"1\nbase\n"
        fork.run(f"echo {number} > /workspace/f")
        for asked in range(number + 1):
            assert fork.run(ASK).stdout == str(asked + 2).encode()
        names.add(fork.run("hostname 2>/dev/null || cat /proc/sys/kernel/hostname").stdout)
    assert len(names) == 3
    assert len({fork.run("echo $RANDOM$RANDOM$RANDOM").stdout for fork in forks}) == 3
    assert box.run("cat /workspace/f").stdout == b"base\n"
    assert box.run(ASK).stdout == b"2"
    for number, fork in enumerate(forks):
        assert fork.run("cat /workspace/f").stdout == f"{number}\n".encode()


def test_an_interrupt_while_it_forks_leaves_no_fork(
    host: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(jobs: list[Any]) -> None:
        raise KeyboardInterrupt

    box = make()
    turn(box, "echo base > /workspace/f")
    monkeypatch.setattr(sandbox_host, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.fork(box.name, 2)
    assert [info.name for info in host.boxes()] == [box.name]


def test_a_restore_that_fails_at_its_end_leaves_nothing_that_runs(
    host: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make()
    turn(box, "echo base > /workspace/f")
    (fork,) = host.fork(box.name)

    def refuse(*_: object) -> None:
        raise MachineError("the sandbox's host name could not be set")

    with monkeypatch.context() as patched:
        patched.setattr(Machine, "freshen", refuse)
        with pytest.raises(SandboxError, match="host name could not be set"):
            fork.rollback(box.tip)
    assert fork.info().status == "dead" and not launch.group(host.home, fork.name).pids()
    fork.restore()
    assert fork.run("cat /workspace/f").stdout == b"base\n"


def test_a_fork_survives_the_removal_of_what_it_was_forked_from(host: Any, make: Callable[..., Any]) -> None:
    box = make()
    turn(box, "echo base > /workspace/f")
    (fork,) = host.fork(box.name)
    host.remove(box.name)
    host.gc()
    kill_all(fork)
    fork.restore()
    assert fork.run("cat /workspace/f").stdout == b"base\n"


def test_diff_and_log_tell_what_happened(make: Callable[..., Any]) -> None:
    box = make()
    first = box.tip
    turn(box, f"echo x > /workspace/new; rm -f /etc/hostname; {SLEEP}")
    diff = box.diff(first, box.tip)
    assert ("/workspace/new", "created") in {(change.path, change.change) for change in diff.files}
    assert any("sleep 1000" in command for command in diff.started) and not diff.ended
    checkpoints, turns = box.log().checkpoints, box.log().turns
    assert [checkpoint.parent for checkpoint in checkpoints] == [None, first]
    assert [turn.turn_class for turn in turns] == [TurnClass.FULL]
    with pytest.raises(UserError, match="not known"):
        box.rollback("no-such-checkpoint")


KILLED_HOST = """
import os, sys
from pathlib import Path
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.model import SandboxSpec
box = SandboxHost(Path(sys.argv[1])).create(SandboxSpec("kept"))
box.run("X=7; echo saved > /workspace/f")
box.end_turn().wait()
box.run("X=8; echo unsaved > /workspace/g")
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_new_host_process_takes_over_what_still_runs(own_home: Path) -> None:
    """The host's process is killed; the next one finds the sandbox, and doubts what it missed."""
    died = preloaded.run(["-c", KILLED_HOST, own_home], modules=preloaded.SANDBOX)
    assert died.returncode == -9, died.stderr.decode()
    show = "echo $X; cat /workspace/f /workspace/g"
    with SandboxHost(own_home) as host:
        box = host.get("kept")
        assert box.info().status == "running"
        assert box.run(show).stdout == b"8\nsaved\nunsaved\n"
        assert box.end_turn().wait().turn_class is TurnClass.FULL
        kill_all(box)
        box.restore()
        assert box.run(show).stdout == b"8\nsaved\nunsaved\n"


def test_a_notice_saves_what_runs_and_says_what_it_could_not(host: Any, make: Callable[..., Any]) -> None:
    first, second = make(), make()
    turn(first, "true")
    first.run("echo 1 > /workspace/f")
    second.run(SLEEP)
    saved = host.notice(30.0)
    assert saved[first.name] == Saved(first.tip) and saved[second.name] == Saved(second.tip)
    assert [first.diff(first.tip).files, second.diff(second.tip).started] == [(), ()]
    second.run("sleep 2000 </dev/null >/dev/null 2>&1 &")
    late = host.notice(0.0)
    assert late[second.name] == Saved(second.tip, fault="no time is left")


def test_sandboxes_come_and_go_beside_each_other(host: Any, make: Callable[..., Any]) -> None:
    """What they share (folders of groups, /dev) is made and removed under each other's hands."""

    def come_and_go(number: int) -> bytes:
        box = host.create(SandboxSpec(f"beside-{number}"))
        said: bytes = box.run(f"echo {number}").stdout
        host.remove(box.name)
        return said

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(come_and_go, range(12))) == [f"{number}\n".encode() for number in range(12)]


def test_what_this_host_lacks_is_told_when_it_opens(
    new_home: Path, small_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(btrfs, "usable", lambda folder: "mkfs.btrfs is missing; install btrfs-progs")
    monkeypatch.setattr(sandbox_host, "find_criu", lambda: None)
    monkeypatch.setattr(kernel, "missing", lambda: "this kernel has no BTF")
    events: list[Any] = []
    with SandboxHost(new_home, on_event=events.append) as host:
        assert host.context.pool.kind == "copy" and host.context.criu is None
        box = host.create(SandboxSpec("a", image=str(small_root)))
        assert turn(box, "X=1; echo 1 > /workspace/f")[1].turn_class >= TurnClass.FILES
        box.restore()
        assert box.run("echo $X; cat /workspace/f").stdout == b"1\n1\n"
    words = [event.detail for event in events if event.kind == "weaker"]
    assert any("mkfs.btrfs is missing; install btrfs-progs" in line for line in words), events
    assert any("CRIU is missing" in line and "windtunnel sandbox setup" in line for line in words)
    assert any("looked at by" in line for line in words)


def test_that_memory_cannot_be_watched_is_told_beside_ebpf_too(
    new_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "missing", lambda: "needs Linux 6.7")
    events: list[Any] = []
    with SandboxHost(new_home, on_event=events.append):
        pass
    words = [event.detail for event in events if event.kind == "weaker"]
    assert [line for line in words if "misses which memory was written: needs Linux 6.7" in line], events


def test_a_limit_that_the_host_cannot_hold_is_told(
    make: Callable[..., Any], events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "the limit on CPUs could not be set: Permission denied"
    create = Cgroup.create
    monkeypatch.setattr(Cgroup, "create", lambda group, limits: [*create(group, limits), words])
    box = make()
    assert words in [event.detail for event in events if event.box == box.name]
