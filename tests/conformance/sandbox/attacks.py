"""The list of attacks, run in a sandbox before and after a restore, and what is looked at from outside.

A second sandbox stands beside the first one: what a message or a change could reach. Everything on the host
that an attack aims at is made for it: a file, a process, a socket, a port.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents.sandbox.harness import new_name
from conformance.sandbox.attack_list import ATTACKS
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.context import FAULTS
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.machine import walls
from windtunnel.agents.sandbox.machine.walls import PROGRAM
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec
from windtunnel.base.errors import HostError, UserError
from windtunnel.linux import cgroup

INSIDE = Path(__file__).with_name("attack_inside.py")
LIMITS = SandboxLimits(memory=128 << 20, pids=64)
FAILURES = (UserError, HostError, SandboxError, *FAULTS)
MOST_GROWTH = 256 << 20
EVENTS = 0.05
"""Seconds between two events of a device of the host."""
CHANNEL = """
import os, shutil
for folder, names, files in os.walk('/.windtunnel', topdown=False):
    for number, name in enumerate(sorted(names) + sorted(files)):
        path = os.path.join(folder, name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        (lambda: os.symlink({secret!r}, path), lambda: os.mkfifo(path), lambda: os.mkdir(path))[number % 3]()
"""
FORGED = """
import os
for line in (b'0 0 0\\n', b'exit 0\\n', b'-1 ' * 99999, b'\\0' * 4096, os.urandom(60000)):
    ack = os.open('/.windtunnel/main/ack', os.O_RDWR | os.O_NONBLOCK)
    try: os.write(ack, line)
    except BlockingIOError: pass
"""
HUGE = """
import os
for folder, names, files in os.walk('/.windtunnel'):
    for name in files:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and name != 'init': os.truncate(path, 1 << 40)
"""
RACE = """
import os
os.makedirs('/workspace/true', exist_ok=True)
for _ in range(20000):
    for target in ('true', {folder!r}):
        os.path.lexists('/workspace/new') and os.unlink('/workspace/new')
        os.symlink(target, '/workspace/new'); os.rename('/workspace/new', '/workspace/race')
"""


@dataclass(frozen=True)
class Outcome:
    """Of one attack and user: what it reached, or why it was refused, or why it proves nothing."""

    name: str
    user: int
    reached: str = ""
    refused: str = ""
    broken: str = ""


@dataclass
class Scene:
    """An attacker, a sandbox beside it, and what the host has that neither may reach."""

    host: SandboxHost
    box: Box
    other: Box
    folder: Path
    secret: Path
    victim: subprocess.Popen[bytes]
    abstract: str
    port: int
    before: dict[str, Any] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """What the attacks may refer to."""
        assert LIMITS.memory is not None and LIMITS.pids is not None
        return {
            "SECRET": str(self.secret),
            "HOME": str(self.host.home.path),
            "VICTIM": self.victim.pid,
            "ABSTRACT": self.abstract,
            "PORT": self.port,
            "PIDS": LIMITS.pids,
            "MEMORY": LIMITS.memory,
            "MASKS": [path for path in walls.walls() if path.removeprefix("/proc/") in walls.MASKED],
        }

    def at(self, path: str, box: Box | None = None) -> Path:
        """A path inside (the other one's by default), as the host sees it."""
        return Path(f"/proc/{(box or self.other).machine().pid}/root{path}")

    def look(self) -> dict[str, Any]:
        """What must stay as it is, whatever the attacker does."""
        nodes = [self.at(f"/dev/{name}").lstat() for name in walls.NODES]
        return {
            "nodes": [(node.st_mode, node.st_uid, node.st_mtime_ns, node.st_atime_ns) for node in nodes],
            "programs": [
                _digest(file)
                for name in ("tac", "sum")
                for file in (self.at(f"/usr/bin/{name}"), Path("/usr/bin", name))
            ],
            "init": [_digest(self.at("/.windtunnel/init")), _digest(PROGRAM.locate())],
            "preload": Path("/etc/ld.so.preload").exists(),
            "secret": self.secret.read_bytes(),
        }


@contextlib.contextmanager
def scene(host: SandboxHost, folder: Path) -> Iterator[Scene]:
    """Two sandboxes and what they may not reach; all of it is gone afterwards."""
    secret = folder / "secret"
    secret.write_text("of the host")
    name = f"{new_name('windtunnel-attacked')}-{os.getpid()}"  # as others here may do the same
    with contextlib.ExitStack() as stack:
        boxes = [host.create(SandboxSpec(new_name("attack"), limits=LIMITS)) for _ in range(2)]
        for box in boxes:
            stack.callback(host.remove, box.name)
        victim = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        number = port.getsockname()[1]
        yield Scene(host, boxes[0], boxes[1], folder, secret, victim, name, number)


def struck(at: Scene) -> list[Outcome]:
    """Every attack once, of the sandbox as it stands; its channel is in ruins afterwards."""
    at.before = at.look()
    at.box.put("/tmp/attacks.py", INSIDE.read_bytes())
    inside = [vars(attack) for attack in ATTACKS if attack.code]
    at.box.put("/tmp/attacks.json", json.dumps({"attacks": inside, "names": at.names()}).encode())
    with _events_of_devices():
        done = at.box.run("python3 /tmp/attacks.py /tmp/attacks.json", timeout=120)
    if done.exit_code != 0:
        raise SandboxError(
            f"the attacks did not come to their end: {done.ended}, {done.stderr.decode()[-500:]}"
        )
    outcomes = [Outcome(**fields) for fields in json.loads(done.stdout)]
    for attack in ATTACKS:
        if not attack.check:
            continue
        reached = CHECKS[attack.check](at)
        if not attack.code:
            fields = {"reached": reached} if reached else {"refused": attack.check}
            outcomes.append(Outcome(attack.name, 0, **fields))
        elif reached:
            outcomes = [
                Outcome(outcome.name, outcome.user, reached=reached)
                if outcome.name == attack.name
                else outcome
                for outcome in outcomes
            ]
    return outcomes


@contextlib.contextmanager
def _events_of_devices() -> Iterator[None]:
    """The kernel tells of a device of the host, again and again, within the block."""
    end = threading.Event()

    def tell() -> None:
        with contextlib.suppress(OSError):
            while not end.wait(EVENTS):
                Path("/sys/class/mem/null/uevent").write_text("change")

    thread = threading.Thread(target=tell, name="attacks-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _same(what: str) -> Callable[[Scene], str]:
    def check(at: Scene) -> str:
        now = at.look()[what]
        return "" if now == at.before[what] else f"{what}: {at.before[what]} became {now}"

    return check


def _lock(at: Scene) -> str:
    """A lock that the attacker holds on a device or mask must hold up nobody else."""
    hold = "import fcntl, time; held = [open(p) for p in ('/dev/null', '/proc/keys')]; "
    hold += "[fcntl.flock(file, fcntl.LOCK_EX) for file in held]; open('/tmp/locked', 'w'); time.sleep(60)"
    at.box.run(f'python3 -c "{hold}" & until [ -e /tmp/locked ]; do sleep 0.01; done', timeout=20)
    try:
        for path in ("/dev/null", "/proc/keys"):
            with at.at(path).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"a lock on {path} is seen elsewhere"
    finally:
        at.box.run("kill %%; rm -f /tmp/locked", timeout=20)
    return ""


def _victim(at: Scene) -> str:
    return "" if at.victim.poll() is None else "a process of the host was killed"


def _memory(at: Scene) -> str:
    """What the kernel saw the sandbox hold at most."""
    points, group = cgroup.mounts(), at.box.machine().cgroup.path
    old = points.v1.get("memory")
    file = old / group.relative_to(points.unified) / "memory.max_usage_in_bytes" if old else None
    held = int((file or group / "memory.peak").read_text())
    assert LIMITS.memory is not None
    return f"{held} bytes were held" if held > LIMITS.memory else ""


def _put(at: Scene) -> str:
    with contextlib.suppress(*FAILURES):
        at.box.put("/workspace/out", b"evil")
    return _same("secret")(at)


def _get(at: Scene) -> str:
    with contextlib.suppress(*FAILURES):
        if at.before["secret"] in at.box.get("/workspace/in"):
            return "a file of the host was read"
    return ""


def _fifo(at: Scene) -> str:
    return _ends(lambda: at.box.get("/workspace/fifo"), "get")


def _ends(work: Callable[[], object], what: str, seconds: float = 10.0) -> str:
    def quietly() -> None:
        with contextlib.suppress(*FAILURES):
            work()

    thread = threading.Thread(target=quietly, name="attacks-patience", daemon=True)
    thread.start()
    thread.join(seconds)
    return f"{what} of the host hangs" if thread.is_alive() else ""


def _race(at: Scene) -> str:
    target = at.folder / "race"
    target.mkdir(exist_ok=True)
    at.box.put("/tmp/race.py", RACE.format(folder=str(target)).encode())
    at.box.run("python3 /tmp/race.py & until [ -L /workspace/race ]; do sleep 0.01; done", timeout=20)
    for number in range(100):
        with contextlib.suppress(*FAILURES):
            at.box.put(f"/workspace/race/{number}", b"evil")
    at.box.run("kill %%", timeout=20)
    return ", ".join(os.listdir(target)) and "files were put into a folder of the host"


def _preload(at: Scene) -> str:
    at.box.run("rm /etc/ld.so.preload", timeout=20)
    return _same("preload")(at)


def _import(at: Scene) -> str:
    image = at.folder / "evil.tar"
    with tarfile.open(image, "w") as tar:
        for name, kind, link in (
            ("../../escaped", tarfile.REGTYPE, ""),
            (f"{at.folder}/escaped", tarfile.REGTYPE, ""),
            ("out", tarfile.SYMTYPE, str(at.folder)),
            ("out/escaped", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, str(at.secret)),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member)
    with contextlib.suppress(*FAILURES):
        at.host.context.pool.import_image(str(image))
    escaped = (at.folder / "escaped").exists() or at.secret.stat().st_nlink > 1
    return "a file was written outside of the image" if escaped else ""


def _abused(at: Scene, program: str) -> str:
    """A program of the sandbox ruins the channel while its command runs; then the host asks for more."""
    at.box.put("/tmp/abuse.py", program.encode())
    before = psutil.Process().memory_info().rss

    def use() -> None:
        for command in ("python3 /tmp/abuse.py", "echo more"):
            with contextlib.suppress(*FAILURES):
                at.box.run(command, timeout=2)

    wrong = _ends(use, "a command", 20.0) or _same("secret")(at)
    grown = psutil.Process().memory_info().rss - before
    return wrong or (f"the host took {grown >> 20} MiB for it" if grown > MOST_GROWTH else "")


def _channel(at: Scene) -> str:
    return _abused(at, CHANNEL.format(secret=str(at.secret)))


CHECKS: dict[str, Callable[[Scene], str]] = {
    "same nodes elsewhere": _same("nodes"),
    "lock seen elsewhere": _lock,
    "victim lives": _victim,
    "memory within its limit": _memory,
    "put stays inside": _put,
    "get stays inside": _get,
    "get of a FIFO ends": _fifo,
    "put under a race stays inside": _race,
    "host loads nothing": _preload,
    "import stays inside": _import,
    "image is the same elsewhere": _same("programs"),
    "init is the same elsewhere": _same("init"),
    "forged answers end": lambda at: _abused(at, FORGED),
    "huge files end": lambda at: _abused(at, HUGE),
    "channel stays inside": _channel,
}


def twice(host: SandboxHost, folder: Path) -> tuple[list[Outcome], list[Outcome]]:
    """The attacks on a new sandbox, and on the same one after a restore of all of it."""
    with scene(host, folder) as at:
        at.box.checkpoint(full=True)
        before = struck(at)
        at.box.restore()
        return before, struck(at)
