"""What happens to an ordinary user's sandboxes, one story for each test: ``rootless_stories.py STORIES HOME
IMAGE``, run by a user who is not root. A story that comes to its end has found everything as it should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.context import SandboxEvent
from windtunnel.agents.sandbox.criu.doctor import doctor, rung
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied
from windtunnel.agents.sandbox.files.host_image import Package, fill
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.machine.group import STOPPED
from windtunnel.agents.sandbox.machine.walls import socket_inside
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec, TurnClass, TurnRecord
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.policy import decide
from windtunnel.base.errors import UserError
from windtunnel.linux import processes

DEADLINE = 60.0
MANY = """
import os, signal
pids = []
try:
    while len(pids) < 40:
        pid = os.fork()
        if not pid:
            signal.pause()
        pids.append(pid)
except BlockingIOError:
    pass
print(len(pids))
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""
"""Says how many processes it could start."""


def spec(name: str, **fields: Any) -> SandboxSpec:
    return SandboxSpec(name=name, image=sys.argv[3], **fields)


def until(happened: Callable[[], bool]) -> None:
    """Waits for something that another process does."""
    deadline = time.monotonic() + DEADLINE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def refused(work: Callable[[], object], words: str, kind: type[Exception] = UserError) -> None:
    try:
        work()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was refused that says {words!r}")


def less(work: Callable[[], object], words: str) -> None:
    refused(work, words, IncompleteError)


def judged(turn: TurnRecord, wanted: TurnClass) -> None:
    """The turn has that class, unless the host was too busy for the shell to come back to its prompt."""
    assert turn.required is wanted or any("is busy" in reason for reason in turn.reasons), turn


def turns(home: Path) -> None:
    """Commands, their outputs and ends; what class each turn has; what a checkpoint says of itself."""
    with SandboxHost(home) as host:
        box = host.create(spec("one"))
        got = box.run("echo out; echo err >&2; exit 3")
        assert (got.stdout, got.stderr, got.exit_code) == (b"out\n", b"err\n", 3)
        assert box.run("sleep 60", timeout=0.2).ended == "timeout"
        assert box.run("echo still here").text == "still here\n"
        box.end_turn().wait()
        judged(box.end_turn().wait(), TurnClass.NONE)
        box.run("cd /tmp; export COLOUR=red")
        judged(box.end_turn().wait(), TurnClass.SHELL)
        box.run("echo text >/workspace/file")
        turn = box.end_turn().wait()
        judged(turn, TurnClass.FILES)
        assert "created /workspace/file" in turn.reasons
        box.put("/workspace/put", b"from outside")
        judged(box.end_turn().wait(), TurnClass.FILES)
        assert box.get("/workspace/put") == b"from outside"
        # the turn ends when the process has become the sleep, and is not the shell's fork of itself any more
        box.run(
            "setsid sleep 1000 </dev/null >/dev/null 2>&1 & disown;"
            " until grep -qx sleep /proc/$!/comm; do :; done"
        )
        less(lambda: box.end_turn().wait(), "sleep 1000")
        turn = box.log().turns[-1]
        judged(turn, TurnClass.FULL)
        assert turn.turn_class is TurnClass.FILES
        assert any(reason.startswith("sleep (") for reason in turn.reasons), turn.reasons
        less(box.checkpoint, "sleep 1000")
        manifest = box.checkpoint(allow_less=True)
        assert manifest.image is None
        assert [(lack.kind, "without root" in lack.why) for lack in manifest.lacks] == [("processes", True)]
        assert "files" in manifest.restorable
        assert all(decide(observation) == answer for observation, answer in box.decisions())


def isolation(home: Path) -> None:
    """What is inside, and what cannot be reached from there."""
    outside = home / "secret"
    outside.write_text("mine")
    with SandboxHost(home) as host:
        box = host.create(spec("one"))
        assert box.run("id -u; hostname").text == "0\none\n"
        assert box.run("cat /proc/self/uid_map").text.split() == ["0", str(os.getuid()), "1"]
        assert box.run(f"cat {outside}").exit_code != 0
        assert box.run("echo /sys/*").text == "/sys/*\n"
        interfaces = box.run("cat /proc/net/dev").text.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        pids = box.run("echo /proc/[0-9]*").text.split()
        assert len(pids) <= 4, pids
        assert f"/proc/{os.getpid()}" not in pids
        for command in (
            "unshare -U true", "mount -t tmpfs none /mnt", "mknod /tmp/disk b 8 0", "umount /proc",
            "chown 1000 /workspace", "echo x >/proc/sys/kernel/hostname", "touch /dev/file", "rm /dev/null",
        ):  # fmt: skip
            assert box.run(command).exit_code != 0, command
        for device in ("null", "zero", "full", "random", "urandom", "tty"):
            assert box.run(f"test -c /dev/{device}").exit_code == 0, device
        assert box.run("head -c 3 /dev/zero | wc -c; echo a >/dev/null; echo b >/dev/shm/b").text == "3\n"
        status = box.run("cat /proc/self/status").text
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        mounts = box.run("cat /proc/self/mountinfo").text
        assert " - cgroup" not in mounts
        assert " - sysfs" not in mounts


def restore(home: Path) -> None:
    """Files of all kinds and shells come back, services start again, and what does not come back is said."""
    with SandboxHost(home) as host:
        box = host.create(spec("one", services={"idle": "sleep 2000"}))
        box.run("cd /workspace; export COLOUR=red; greet() { echo hello $COLOUR; }")
        box.run(
            "echo a >a; ln a b; ln -s a c; mkfifo pipe; echo k >locked; chmod 0 locked; mkdir shut; "
            "echo i >shut/inner; chmod 0 shut; chmod 4755 a"
        )
        # twice: the second takes what did not change from the first
        box.checkpoint(full=True)
        kept = box.checkpoint(full=True)
        listing = "stat -c '%n %a %F %h' a b c pipe locked shut"
        before = box.run(listing).text
        box.run("rm -rf /workspace/*; chmod 700 /workspace; greet() { echo no; }; cd /; sleep 3000 &")
        less(lambda: box.end_turn().wait(), "sleep 3000")
        report = box.restore(kept.id)
        assert "files" in report.restored
        assert report.lacks == (), "a declared service and shells lack nothing"
        assert any("service idle" in words for words in report.restored)
        assert box.run("pwd; greet").text == "/workspace\nhello red\n"
        assert box.run(listing).text == before
        assert box.run("cat locked shut/inner; cat c").text == "k\ni\na\n"
        running = box.info().processes
        assert any("sleep 2000" in line for line in running), running
        assert not any("sleep 3000" in line for line in running), running
        pid = box.info().pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: box.info().status == "dead")
        refused(lambda: box.run("true"), "is dead", SandboxDied)
        box.restore()
        assert box.run("greet").text == "hello red\n"


def forks(home: Path) -> None:
    """Forks go their own ways; what bounds them, and what is said not to."""
    events: list[SandboxEvent] = []
    with SandboxHost(home, on_event=events.append) as host:
        limits = SandboxLimits(memory=2**30, pids=20, cpus=1.0)
        unheld = spec("one", limits=replace(limits, disk=2**30))
        refused(lambda: host.create(unheld), "of 1024 MiB of disk cannot be held here")
        box = host.create(spec("one", limits=limits))
        details = " ".join(event.detail for event in events if event.box == "one")
        for words in ("memory holds for each process", "CPUs"):
            assert words in details, details
        box.run("export COLOUR=red; echo common >/workspace/file")
        first, second = host.fork("one", 2)
        first.run("echo more >>/workspace/file")
        assert (
            second.run("hostname; cat /workspace/file; echo $COLOUR").text == f"{second.name}\ncommon\nred\n"
        )
        assert box.run("cat /workspace/file").text == "common\n"
        first.put("/tmp/many.py", MANY.encode())
        assert 10 < int(first.run("python3 /tmp/many.py").text) < 20
        # the limit is one of the sandbox, not of the user
        assert second.run("bash -c 'for i in $(seq 10); do sleep 1 & done; wait'").exit_code == 0
        assert box.run("dd if=/dev/zero of=/dev/null bs=1500M count=1", timeout=60).exit_code != 0
        assert host.get(first.name).machine().cgroup.usage()[1] > 0


def freeze(home: Path) -> None:
    """Everything stands still, threads too; what its user had stopped stays stopped."""
    with SandboxHost(home) as host:
        box = host.create(spec("one"))
        box.run("(while :; do echo x >>/tmp/ticks; done) &")
        box.run("sleep 1000 & kill -STOP $!; until grep -q 'State:.T' /proc/$!/status; do :; done; pid=$!")
        threads = (
            "import threading, itertools\\n"
            "def count():\\n for _ in itertools.count(): open('/tmp/threads', 'a').write('x')\\n"
            "for _ in range(4): threading.Thread(target=count).start()"
        )
        box.run(f'printf "{threads}" >/tmp/t.py; python3 /tmp/t.py </dev/null >/dev/null 2>&1 &')
        machine = box.machine()
        for name in ("/tmp/ticks", "/tmp/threads"):
            until(lambda name=name: machine_has(box, name))  # type: ignore[misc]
        machine.cgroup.freeze()
        before = [len(box.get(name)) for name in ("/tmp/ticks", "/tmp/threads")]
        pids = machine.cgroup.pids()
        assert all(stands(thread) for pid in pids for thread in map(int, os.listdir(f"/proc/{pid}/task")))
        assert [len(box.get(name)) for name in ("/tmp/ticks", "/tmp/threads")] == before
        assert machine.cgroup.pids() == pids
        machine.cgroup.thaw()
        assert not (home / "boxes/one" / STOPPED).exists()
        assert box.run("grep State /proc/$pid/status").text.split()[1] == "T"
        until(lambda: len(box.get("/tmp/ticks")) > before[0])
        machine.cgroup.freeze()
        box.stop()
        assert not machine.cgroup.pids()


def machine_has(box: object, path: str) -> bool:
    try:
        return bool(box.get(path))  # type: ignore[attr-defined]
    except UserError:
        return False


def crash(home: Path) -> None:
    """A host that is killed while a sandbox stands still leaves it running, and the next one finds it."""
    child = subprocess.Popen(
        [sys.executable, __file__, "crashing", str(home), sys.argv[3]], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    assert stands(pid)
    child.kill()
    child.wait()
    until(lambda: not stands(pid))
    until(lambda: not (home / "boxes/one" / STOPPED).exists())
    with SandboxHost(home) as host:
        box = host.get("one")
        assert box.info().pid == pid
        assert box.run("echo $COLOUR").text == "red\n"
        assert box.checkpoint(full=True).files is not None


def crashing(home: Path) -> None:
    host = SandboxHost(home)
    box = host.create(spec("one"))
    box.run("export COLOUR=red")
    box.machine().cgroup.freeze()
    print(box.info().pid, flush=True)
    signal.pause()


def stands(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def leftovers(home: Path) -> None:
    """What a crash leaves is found and removed: a sandbox whose record is lost, a tree without one."""
    with SandboxHost(home) as host:
        pid = host.create(spec("one")).info().pid
    (home / "boxes/one/box.json").unlink()
    with SandboxHost(home) as host:
        assert host.boxes() == []
        until(lambda: processes.state(pid) in ("", "Z"))
        assert any("sandbox one" in words for words in host.gc(dry_run=True).leftovers)
        host.gc()
        assert host.gc(dry_run=True).leftovers == ()


def proxy(home: Path) -> None:
    """The host listens inside; the sandbox reaches it, and nobody else does."""
    with SandboxHost(home) as host:
        box = host.create(spec("one"))
        with socket_inside(box.machine().externals.netns, "listen on", 7080) as plug:
            box.run("exec 5<>/dev/tcp/127.0.0.1/7080")
            plug.settimeout(DEADLINE)
            conversation, _ = plug.accept()
            conversation.sendall(b"from the host\n")
            conversation.close()
            assert box.run("cat <&5; exec 5<&-").text == "from the host\n"
            try:
                urllib.request.urlopen("http://127.0.0.1:7080/", timeout=1)
            except OSError:
                pass
            else:
                raise AssertionError("the sandbox's port answers outside")


def refusals(home: Path) -> None:
    """What needs root is refused in words, and nothing is left of it."""
    refused(lambda: SandboxHost(Path("/root/windtunnel")), "home /root/windtunnel cannot be used")
    with SandboxHost(home) as host:
        refused(lambda: SandboxHost(home), "is held by process")
        assert host.boxes() == []
    assert rung(doctor())[1] == ("user-namespaces",)


def closed(home: Path) -> None:
    """Run where no user namespace may be made: the setting is named."""
    refused(lambda: SandboxHost(home), "user.max_user_namespaces is 0")
    assert not any(facility.present for facility in doctor() if facility.name == "user-namespaces")


def image_of_the_host(home: Path) -> None:
    """The image 'host' can be made by a user."""
    with SandboxHost(home) as host:
        box = host.create(SandboxSpec(name="one"))
        assert box.run("git --version").exit_code == 0


def partial(home: Path) -> None:
    """A host image leaves out what the user may not read, and says so. ``home/fake`` was made by root."""
    (home / "made").mkdir()
    (note,) = fill(home / "made", [Package("tool", "1", "all", (), ())], home / "fake")
    assert (home / "made/usr/tool").read_text() == "for all"
    assert not (home / "made/usr/hidden").exists()
    assert "1 files" in note and "/usr/hidden" in note


def tidy(home: Path) -> None:
    """The end of every story: all is removed, and nothing runs or lies about."""
    with SandboxHost(home) as host:
        held = [host.get(info.name) for info in host.boxes()]
        groups = [box.machine().cgroup for box in held if box.info().status == "running"]
        for box in held:
            host.remove(box.name)
        host.gc()
        assert not any(group.pids() for group in groups)
        assert host.context.pool.snapshots() == []
    at = Home(home)
    assert list(at.boxes.iterdir()) == []
    assert list((at.pool / "live").iterdir()) == []
    assert list((at.pool / "trash").iterdir()) == []
    assert str(home) not in Path("/proc/mounts").read_text()


if __name__ == "__main__":
    assert os.geteuid() != 0
    for story in sys.argv[1].split(","):
        globals()[story](Path(sys.argv[2]))
