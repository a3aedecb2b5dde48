"""Kills of the host's process at chosen points, and long random lives of sandboxes: whatever happens, the
next host finds everything, and nothing is left on the machine."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.conftest import fresh_home
from agents.sandbox.daemon.daemons import pid_of
from agents.sandbox.hurt import COUNT, COUNTER, checked, frozen, traces, turn
from agents.sandbox.proxy.fake_model import FakeModel
from agents.sandbox.proxy.test_model_proxy import ASK, ask
from support import preloaded
from support.waiting import gone, until
from windtunnel.agents.sandbox.client import connect
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home
from windtunnel.linux import cgroup

pytestmark = pytest.mark.root


SHOW = "echo $X; cat /workspace/f"


KILLED = """
import os, sys
from pathlib import Path
from windtunnel.agents.sandbox import checkpoint, inventory, restore, store
from windtunnel.agents.sandbox import box as boxes
from windtunnel.agents.sandbox import criu as sandbox_criu
from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.store import Writer
from windtunnel.agents.sandbox.inspect import Inspector
from windtunnel.agents.sandbox.machine import Machine, walls
from windtunnel.agents.sandbox.machine.group import Cgroup
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base import atomic
from windtunnel.linux.faults import inject_at

home, name, setup, point, act = sys.argv[1:]
host = SandboxHost(Path(home))
Pool, Store = type(host.context.pool), type(host.context.store)
if setup:
    box = host.create(SandboxSpec(name))
    box.run(setup)
    box.end_turn().wait()
    box.run("X=2; echo 2 > /workspace/f")
when, nth, owner, method = point.split()
inject_at(eval(owner), method, when, int(nth))
exec(act)
print("it lived", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def lasting() -> Iterator[Path]:
    """A home of the tests of one file, whose hosts come and go; in the end nothing of it is left on the
    machine."""
    with fresh_home() as folder:
        yield folder
    until(lambda: not traces(folder))


def killed(home: Path, name: str, setup: str, point: str, act: str) -> None:
    """A process that holds the home, and is killed before or after the nth call of a function of its own."""
    died = preloaded.run(["-c", KILLED, home, name, setup, point, act], modules=preloaded.SANDBOX)
    assert died.returncode == -9, died.stderr.decode()[-2000:]
    # a CRIU that was at work goes on for a moment, and the guard thaws until it has ended
    until(lambda: not [line for line in traces(home) if "windtunnel-guard" in line])
    assert not frozen(home)


_NUMBERS = count(1)
SETUP = f"{COUNTER}; X=1; echo 1 > /workspace/f"
CHECKPOINT = "box.checkpoint(full=True)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "after 1 Cgroup freeze",
        "before 1 Inspector references",
        "after 1 Pool snapshot",
        "before 1 sandbox_criu _ends",
        "before 1 Inspector rebase",
        "before 1 Cgroup thaw",
        "after 1 Pool sync",
        "before 1 Writer add",
        "after 1 Writer add",
        "after 1 Store add",
        "before 1 boxes write_record",
    ],
)
def test_the_host_is_killed_in_a_checkpoint(lasting: Path, point: str) -> None:
    """The sandbox runs on, the next host takes it over, and no half of a checkpoint is to be seen."""
    from windtunnel.agents.sandbox.host import SandboxHost

    name = f"c{next(_NUMBERS)}"
    killed(lasting, name, SETUP, point, CHECKPOINT)
    with SandboxHost(lasting) as host:
        box = host.get(name)
        assert box.info().status == "running"
        good = box.tip
        checked(host)
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"2\n2\n1\n"
        turn(box, "X=3")
        newer = box.tip
        assert host.context.store.load(newer).image is not None, host.context.store.load(newer)
        box.restore()
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"3\n2\n2\n"
        box.rollback(good)
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"1\n1\n1\n"
        host.remove(name)
        checked(host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "after 1 Pool clone",
        "after 1 Store begin",
        "before 1 sandbox_criu _ends",
        "after 1 Criu restore",
        "after 1 Machine adopt",
        "before 2 boxes write_record",
    ],
)
def test_the_host_is_killed_in_a_restore(lasting: Path, point: str) -> None:
    from windtunnel.agents.sandbox.host import SandboxHost

    name = f"r{next(_NUMBERS)}"
    killed(lasting, name, SETUP, point, "box.restore()" if point[7] == "1" else "box.stop(); box.restore()")
    with SandboxHost(lasting) as host:
        box = host.get(name)
        checked(host)
        box.restore()
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"1\n1\n1\n"
        host.remove(name)
        checked(host)


@pytest.mark.parametrize("point", ["before 1 walls seal", "after 1 restore put_right"])
def test_what_was_not_looked_at_never_runs(lasting: Path, point: str) -> None:
    """The host is killed while what it restored stands still to be held against what stood: nothing of that
    is let go, nor does anything stand still."""
    from windtunnel.agents.sandbox.host import SandboxHost

    name = f"u{next(_NUMBERS)}"
    killed(lasting, name, SETUP, point, "box.stop(); box.restore()")
    group = cgroup.HostCgroup(Path(f"windtunnel-{Home(lasting).tag}") / name)
    assert until(lambda: not group.pids()), group.pids()
    with SandboxHost(lasting) as host:
        box = host.get(name)
        assert box.info().status != "running"
        checked(host)
        box.restore()
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"1\n1\n1\n"
        host.remove(name)
        checked(host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    ["after 2 Pool clone", "after 3 Criu restore", "before 2 boxes write_record", "before 3 Machine freshen"],
)
def test_the_host_is_killed_while_it_forks(lasting: Path, point: str) -> None:
    """Forks that were made are there; of the others only names are left, and these can be used again."""
    from windtunnel.agents.sandbox.host import SandboxHost

    name = f"f{next(_NUMBERS)}"
    names = [f"{name}-{number}" for number in range(1, 5)]
    killed(lasting, name, SETUP, point, "host.fork(box.tip, 4)")
    with SandboxHost(lasting) as host:
        there = {info.name for info in host.boxes()}
        assert name in there and not set(names) <= there
        checked(host)
        for fork in there & set(names):
            assert host.get(fork).run(f"{SHOW}; {COUNT}").stdout == b"1\n1\n1\n"
        box = host.get(name)
        assert box.run(f"{SHOW}; {COUNT}").stdout == b"2\n2\n1\n"
        for fork in host.fork(box.log().checkpoints[1].id, len({*names} - there)):
            assert fork.name in names
            assert fork.run(f"{SHOW}; {COUNT}").stdout == b"1\n1\n1\n"
        for box_name in (name, *names):
            host.remove(box_name)
        checked(host)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after 1 Pool create", "after 1 Machine start", "after 1 Pool snapshot"])
def test_the_host_is_killed_while_it_makes_a_sandbox(lasting: Path, point: str) -> None:
    from windtunnel.agents.sandbox.host import SandboxHost

    name = f"n{next(_NUMBERS)}"
    killed(lasting, name, "", point, "host.create(SandboxSpec(name))")
    with SandboxHost(lasting) as host:
        assert name not in {info.name for info in host.boxes()}
        box = host.create(SandboxSpec(name))
        assert box.run("echo here").stdout == b"here\n"
        host.remove(name)
        checked(host)


@dataclass(frozen=True)
class State:
    """What a sandbox is: its files, a variable of its shell, and the memory of its service."""

    files: tuple[tuple[str, int], ...] = ()
    variable: int = 0
    counted: int = 0

    @property
    def shown(self) -> bytes:
        lines = [str(self.variable), *(f"{name} {value}" for name, value in self.files)]
        return ("\n".join(lines) + "\n").encode()


@dataclass
class Life:
    """A host, and what each of its sandboxes and checkpoints must be."""

    home: Path
    dice: random.Random
    host: Any = None
    now: dict[str, State] = field(default_factory=dict)
    kept: dict[str, State] = field(default_factory=dict)
    created: int = 0

    def open(self) -> None:
        from windtunnel.agents.sandbox.host import SandboxHost

        self.host = SandboxHost(self.home, retention=4)

    def step(self) -> None:
        """Something that may happen, to one of the sandboxes."""
        if not self.now:
            self.create()
            return
        name = self.dice.choice(sorted(self.now))
        dead = self.host.get(name).info().status != "running"
        weights = {
            self.create: 0 if len(self.now) > 2 else 1,
            self.fork: 0 if len(self.now) > 2 else 2,
            self.work: 8,
            self.end: 7,
            self.kill: 2,
            self.stop: 1,
            self.restore: 2,
            self.rollback: 3,
            self.remove: 1,
            self.collect: 2,
            self.reopen: 1,
        }
        if dead:
            weights = {self.restore: 3, self.rollback: 1, self.remove: 1, self.reopen: 1}
        act = self.dice.choices(list(weights), list(weights.values()))[0]
        act(name)

    def create(self, _: str = "") -> None:
        self.created += 1
        name = f"b{self.created}"
        box = self.host.create(SandboxSpec(name))
        turn(box, f"X=0; {COUNTER}")
        self.now[name] = State()
        self.saved(name)

    def fork(self, name: str) -> None:
        (fork,) = self.host.fork(name)
        self.saved(name)
        self.now[fork.name] = self.now[name]
        self.look(fork.name)

    def work(self, name: str) -> None:
        box, was = self.host.get(name), self.now[name]
        files = dict(was.files)
        what, value = self.dice.choice(["none", "write", "write", "remove", "rename", "variable", "count"]), 0
        file = f"m{self.dice.randrange(4)}"
        value = self.dice.randrange(1000)
        if what == "write":
            box.run(f"echo {value} > /workspace/{file}")
            files[file] = value
        elif what == "remove" and files:
            box.run(f"rm -f /workspace/{file}")
            files.pop(file, None)
        elif what == "rename" and file in files:
            box.run(f"mv /workspace/{file} /workspace/m9")
            files["m9"] = files.pop(file)
        elif what == "variable":
            box.run(f"X={value}")
            was = replace(was, variable=value)
        elif what == "count":
            was = replace(was, counted=was.counted + 1)
            assert box.run(COUNT).stdout == f"{was.counted}\n".encode()
        else:
            box.run("ls / > /dev/null")
        self.now[name] = replace(was, files=tuple(sorted(files.items())))

    def end(self, name: str) -> None:
        box = self.host.get(name)
        if self.dice.random() < 0.2:
            box.checkpoint(full=self.dice.random() < 0.5)
        else:
            box.end_turn().wait(60)
        self.saved(name)

    def saved(self, name: str) -> None:
        """The newest checkpoint covers what is, also where the turn was said to need none."""
        tip = self.host.get(name).tip
        assert self.kept.setdefault(tip, self.now[name]) == self.now[name]

    def kill(self, name: str) -> None:
        box = self.host.get(name)
        box.machine().cgroup.kill()
        until(lambda: box.info().status == "dead")

    def stop(self, name: str) -> None:
        self.host.get(name).stop()

    def restore(self, name: str) -> None:
        box = self.host.get(name)
        report = box.restore()
        assert report.lacks == (), report
        self.now[name] = self.kept[box.tip]
        self.look(name)

    def rollback(self, name: str) -> None:
        box = self.host.get(name)
        there = [manifest.id for manifest in box.log().checkpoints if manifest.id in self.kept]
        chosen = self.dice.choice(there)
        box.rollback(chosen)
        self.now[name] = self.kept[chosen]
        self.look(name)

    def look(self, name: str) -> None:
        box, state = self.host.get(name), self.now[name]
        show = "echo $X; cd /workspace; for f in m*; do [ -e $f ] && echo $f $(cat $f); done; cd - >/dev/null"
        shown = box.run(f"({show})").stdout
        assert shown == state.shown, (shown, state)
        self.now[name] = replace(state, counted=state.counted + 1)
        assert box.run(COUNT).stdout == f"{state.counted + 1}\n".encode()

    def remove(self, name: str) -> None:
        self.host.remove(name)
        del self.now[name]

    def collect(self, _: str) -> None:
        checked(self.host)

    def reopen(self, _: str) -> None:
        self.host.close()
        self.open()


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_life(own_home: Path, seed: int) -> None:
    life = Life(own_home, random.Random(seed))
    life.open()
    try:
        for _ in range(40):
            life.step()
        for name in sorted(life.now):
            if life.host.get(name).info().status == "running":
                life.end(name)
            life.restore(name)
            life.remove(name)
        checked(life.host)
    finally:
        life.host.close()
    assert not [line for line in traces(own_home) if "process" in line]


def test_an_agent_asks_once_more_when_the_daemon_was_killed(own_home: Path, model: FakeModel) -> None:
    with connect(own_home) as client:
        box = client.create(SandboxSpec("a", network="proxy", proxy_upstream=model.url))
        model.plan.answer.clear()
        box.run(f"{{ {ASK % 'first'}\n}} > /workspace/first 2>&1 </dev/null &")
        model.wait_for(1)
        daemon = pid_of(own_home)
        os.kill(daemon, signal.SIGKILL)
        until(lambda: gone(daemon))
        box = client.get("a")  # starts the next daemon
        until(lambda: b"Disconnected" in box.get("/workspace/first"))
        model.plan.answer.set()
        assert ask(box, "first") == "2"
        client.remove("a")
        client.down()
