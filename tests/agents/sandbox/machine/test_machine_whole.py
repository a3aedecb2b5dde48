"""Whole sandboxes through CRIU: dumped while they run, restored after all of it was killed, and forked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.criu.program import find_criu
from windtunnel.agents.sandbox.machine import CHANNEL_KEPT, Cgroup, Machine, walls
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Externals, Home

pytestmark = pytest.mark.root


@pytest.fixture
def criu() -> Criu:
    found = find_criu()
    if found is None:
        pytest.skip("needs CRIU 4.2")
    return found


def dump(criu: Criu, machine: Machine, images: Path) -> None:
    criu.dump(machine.pid, images, machine.externals)
    (images / CHANNEL_KEPT).write_bytes(machine.kept_channel())


def restore(criu: Criu, externals: Externals, images: Path) -> int:
    Machine.lay_channel(externals, images / CHANNEL_KEPT)
    return criu.restore(images, externals)


@pytest.fixture
def adopt(home: Home, start: object) -> Iterator[Callable[[str, Path, int], Machine]]:
    """Takes over sandboxes that are cleared after the test; ``start`` looks for leftovers after it."""
    made: list[Machine] = []

    def take(name: str, root: Path, pid: int) -> Machine:
        made.append(Machine.adopt(home, SandboxSpec(name), root, pid))
        return made[-1]

    yield take
    for machine in made:
        machine.close()
        Machine.clear(home, machine.spec.name)


SERVER = (
    "import http.server as h\n"
    "class H(h.BaseHTTPRequestHandler):\n"
    "    n = 0\n"
    "    def do_GET(s):\n"
    "        H.n += 1; s.send_response(200); s.end_headers(); s.wfile.write(str(H.n).encode())\n"
    "    def log_message(s, *a): pass\n"
    "h.HTTPServer(('127.0.0.1', 8000), H).serve_forever()\n"
)
ASK = (
    'python3 -c "import time, urllib.request as u\n'
    "for _ in range(600):\n"
    "    try: print(u.urlopen('http://127.0.0.1:8000').read().decode()); break\n"
    '    except OSError: time.sleep(0.05)"'
)


def test_dump_several_times_kill_all_and_go_on(
    home: Home, start: Callable[..., Machine], adopt: Callable[..., Machine], criu: Criu, tmp_path: Path
) -> None:
    box = start()
    root = box.externals.root
    box.put("/workspace/server.py", SERVER.encode())
    box.run("cd /tmp; x='a b'; f() { echo f$x; }; exec 5>>/tmp/held; python3 /workspace/server.py &")
    box.run("echo side; y=2", shell="other")
    assert box.run(ASK).stdout == b"1\n"
    for number in range(3):
        box.cgroup.freeze()
        dump(criu, box, tmp_path / str(number))
        box.cgroup.thaw()
        assert box.run(ASK).stdout == f"{number + 2}\n".encode(), "it runs on after a dump"
    states, commands, mounts = box.shell_states(), box.commands(), box.run("cat /proc/self/mountinfo").text
    box.close()
    Cgroup(home.tag, "box").kill()
    pid = restore(criu, Machine.prepare(home, SandboxSpec("box"), root), tmp_path / "2")
    walls.seal(pid)
    machine = adopt("box", root, pid)
    assert machine.run(ASK).stdout == b"4\n", "as of the last dump"
    assert machine.run("f; pwd; echo held >&5; cat /tmp/held").stdout == b"fa b\n/tmp\nheld\n"
    assert machine.run("echo $y", shell="other").stdout == b"2\n"
    assert machine.commands() == commands and set(machine.shells()) == {"main", "other"}
    assert [s.fingerprint for s in machine.shell_states()][1] == states[1].fingerprint

    def told(text: str) -> set[tuple[str, ...]]:
        """Of each mount: what is mounted, where, and all its flags."""
        return {tuple(line.split()[3:6]) for line in text.splitlines()}

    assert told(machine.run("cat /proc/self/mountinfo").text) == told(mounts)
    assert machine.run("echo x >/proc/sys/kernel/core_pattern").exit_code == 1
    seccomp = (
        "python3 -c \"print([l for l in open('/proc/self/status') if l[:4] in ('CapE', 'NoNe', 'Secc')])\""
    )
    said = machine.run(seccomp).text
    assert "00000000a00405fb" in said and "NoNewPrivs:\\t1" in said and "Seccomp:\\t2" in said
    again = restored_again(machine, home, criu, root, tmp_path)
    try:
        assert again.run("f").stdout == b"fa b\n", "an image serves any number of times"
        assert again.run("sleep 1000", timeout=0.1).ended == "timeout"
        assert again.run("exit 3").exit_code == 3, "init still starts shells"
    finally:
        again.close()


def restored_again(machine: Machine, home: Home, criu: Criu, root: Path, folder: Path) -> Machine:
    machine.close()
    Cgroup(home.tag, "box").kill()
    pid = restore(criu, Machine.prepare(home, SandboxSpec("box"), root), folder / "1")
    return Machine.adopt(home, SandboxSpec("box"), root, pid)


def test_a_fork_is_a_sandbox_of_its_own(
    home: Home,
    start: Callable[..., Machine],
    adopt: Callable[..., Machine],
    make_root: Callable[..., Path],
    criu: Criu,
    tmp_path: Path,
) -> None:
    box = start()
    box.run("x=1; sleep 1000 &")
    box.cgroup.freeze()
    dump(criu, box, tmp_path / "image")
    root = make_root("twin")
    (root / ".windtunnel").mkdir()
    box.cgroup.thaw()
    pid = restore(criu, Machine.prepare(home, SandboxSpec("twin"), root), tmp_path / "image")
    twin = adopt("twin", root, pid)
    twin.freshen("twin-host")
    twin.run("echo only here >/tmp/file; x=2; kill %1")
    assert box.run("echo $x; ls /tmp; jobs -r | wc -l").stdout == b"1\n1\n"
    assert twin.get("/etc/hostname") == b"twin-host\n"
    assert twin.run("cat /proc/sys/kernel/hostname").stdout == b"twin-host\n"
    assert box.run("cat /proc/sys/kernel/hostname").stdout == b"box\n"
    assert len(twin.get("/etc/machine-id")) == 33
    assert twin.run("echo $RANDOM$RANDOM").stdout != box.run("echo $RANDOM$RANDOM").stdout
    assert pid in twin.cgroup.pids() and pid not in box.cgroup.pids()
    twin.stop()
    assert box.run("echo $x").stdout == b"1\n"


def test_a_running_sandbox_is_adopted_by_another_daemon(
    home: Home, start: Callable[..., Machine], adopt: Callable[..., Machine]
) -> None:
    box = start()
    box.run("x=7; cd /tmp")
    pid, root = box.pid, box.externals.root
    box.close()
    again = adopt("box", root, pid)
    assert again.run("echo $x; pwd").stdout == b"7\n/tmp\n"
    assert again.shells().keys() == {"main"}


def test_a_command_that_ran_on_without_its_daemon_is_waited_for(
    home: Home, start: Callable[..., Machine], adopt: Callable[..., Machine]
) -> None:
    box = start()
    box.run("mkfifo /tmp/go")
    pid, root = box.pid, box.externals.root
    # the daemon dies while the shell runs a command: nobody reads its answer
    held = os.open(home.channel("box") / "main/in", os.O_WRONLY | os.O_NONBLOCK)
    os.write(held, b"x=1; read line </tmp/go; x=$line\nbuiltin printf 'done old\\n' >/.windtunnel/main/ack\n")
    os.close(held)
    box.close()
    again = adopt("box", root, pid)
    assert again.run("echo late >/tmp/go", shell="other", timeout=60).exit_code == 0
    assert again.run("echo $x", timeout=60).stdout == b"late\n"
