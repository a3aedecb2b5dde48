"""The agent against a supervisor that a test plays: what it starts, passes on, refuses, and leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from host_helpers import SPEAKER, STAYS, alive, environment, script

from support import secret
from support.waiting import PATIENCE, until
from windtunnel.base.calls import Departure
from windtunnel.base.keys import Keys
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.live.agent.link import SupervisorLink
from windtunnel.training.elastic.live.calls import Hello, Post, Supervision
from windtunnel.training.elastic.model import MemberHost, Membership
from windtunnel.training.elastic.spec import JobSpec

WELCOME = {"op": "welcome", "host": 5, "link": 0, "beat": 0.05}


JOB: dict[str, Any] = {
    "frozen_after": 0.4,
    "orphan_after": 30.0,
    "faults": ("kill:rank=0,step=99",),
    "preload": (),
}


class Attendance:
    """What an agent hears, until it is ``over``."""

    def __init__(self, hello: Hello, tell: Any) -> None:
        self.hello, self.tell, self.over = hello, tell, threading.Event()


class Played:
    """A supervisor, by hand, for one agent process."""

    def __init__(self, tmp_path: Path, text: str, **changes: Any) -> None:
        self.tmp = tmp_path
        self._came: queue.SimpleQueue[Attendance] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.heard_before: list[dict[str, Any]] = []
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.server = RpcServer(RpcService.of(Supervision, self), "tcp:127.0.0.1:0", secret.KEYS)
        self.run = tmp_path / "run"
        self.run.mkdir()
        self.memory = Path(f"/dev/shm/windtunnel-test-{os.getpid()}-{tmp_path.name[-12:]}")
        self.memory.mkdir()
        self.keeper = ForkServerKeeper(tmp_path / "z", (), environment())
        names = {field.name for field in fields(AgentConfig)}
        own = {name: changes.pop(name) for name in names & set(changes)}
        config = AgentConfig(
            run=str(self.run),
            secret=secret.kept(tmp_path),
            supervisor=self.server.address.removeprefix("tcp:"),
            job=JobSpec(script(tmp_path, text), **{**JOB, **changes}),
            memory_root=str(self.memory),
            **{"forkserver": str(self.keeper.path), **own},
        )
        config.write(tmp_path / "agent.config")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "windtunnel.training.hosts", str(tmp_path / "agent.config")],
            env=environment(),
            stdout=(tmp_path / "stdout").open("wb"),
            stderr=(tmp_path / "stderr").open("wb"),
        )
        self.now: Attendance

    def attend(self, hello: Hello, tell: Any, gone: Departure) -> None:
        """As `Supervision`."""
        attendance = Attendance(hello, tell)
        gone.then = attendance.over.set
        self._came.put(attendance)
        attendance.over.wait()

    def __getattr__(self, name: str) -> Any:
        def call(link: int, fields: Any = None, **more: Any) -> Any:
            self._heard.put({**(fields or {}), **more, "op": name})
            return self.answers.get() if name == "ask" else None

        return call

    def accept(self, welcome: dict[str, Any] | None = WELCOME) -> Hello:
        """The agent's hello, when it attends anew."""
        self.now = self._came.get(timeout=PATIENCE)
        if welcome is not None:
            self.say(**welcome)
        return self.now.hello

    def die(self, keys: Keys = secret.KEYS) -> None:
        """All connections end, and another supervisor listens there."""
        self.server.close()
        self.server = RpcServer(RpcService.of(Supervision, self), self.server.address, keys)

    def say(self, epoch: int = 1, **message: Any) -> None:
        while True:  # what was said before may not be under way yet
            with contextlib.suppress(BlockingIOError):
                return self.now.tell({"epoch": epoch, **message}, b"")

    def hear(self, op: str, **fields: Any) -> dict[str, Any]:
        """The next call of ``op`` with these fields; others are passed over."""
        while True:
            message = self._heard.get(timeout=PATIENCE)
            if message["op"] == op and fields.items() <= message.items():
                return message
            self.heard_before.append(message)

    def member(
        self, generation: int, epoch: int = 1, *, place: int = 0, mine: Any = (0,), **more: Any
    ) -> None:
        hosts = (MemberHost(5, "127.0.0.1", ""), MemberHost(6, "127.0.0.1", ""))
        per_host = more.pop("per_host", 1)
        plain = Membership(generation, epoch, hosts, per_host, "a test", **more).plain()
        self.say(epoch, op="membership", membership=plain, place=place, mine=list(mine))

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "agents" / "agent.json").read_text()))

    def lines(self, name: str, count: int) -> list[str]:
        """What a worker printed, once it is ``count`` lines: the log may follow the report of the end."""
        path = self.run / "logs" / name

        def whole() -> list[str] | None:
            text = path.read_text()
            return text.splitlines() if text.count("\n") >= count else None

        return until(whole)

    def end(self) -> None:
        for close in (self.process.kill, self.process.wait, self.server.close, self.keeper.close):
            close()
        subprocess.run(["rm", "-rf", str(self.memory)], check=True)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Any]:
    played: list[Played] = []

    def begin(text: str = STAYS, **changes: Any) -> Played:
        played.append(Played(tmp_path, text, **changes))
        return played[0]

    yield begin
    for player in played:
        player.end()


@pytest.fixture
def join(play: Any) -> Any:
    """`play`, up to the first generation."""

    def begin(*arguments: Any, **changes: Any) -> Played:
        played: Played = play(*arguments, **changes)
        played.accept()
        played.member(1)
        return played

    return begin


def test_it_says_who_it_is_and_beats(play: Any) -> None:
    played = play(address="127.0.0.9", domain="rack-1")
    hello = played.accept()
    expected = Hello("127.0.0.9", hello.memory, played.process.pid, domain="rack-1")
    assert hello == expected
    played.hear("beat")
    played.hear("beat")


def test_a_host_may_have_a_long_name(play: Any) -> None:
    """As it comes with a cloud; a path of a socket is short."""
    played = play(name="host-ip-10-0-112-134.us-west-2.compute.internal-4194303")
    assert played.accept().pid == played.process.pid


def test_workers_get_their_environment_and_their_welcome(play: Any) -> None:
    text = SPEAKER + (
        "print(json.dumps([link.place, link.host, link.faults]), flush=True)\n"
        "print(json.dumps({**os.environ, 'CONFIG': json.dumps(link.config)}), flush=True)\n"
    )
    played = play(text, env={"MORE": "1"}, arguments=("--a",))
    played.accept()
    played.member(3, place=1, mine=(2, 3), per_host=2)
    for _ in range(2):
        played.hear("worker", what="exit", status=0)
    lines = played.lines("rank-3.gen-3.log", 3)
    membership, welcome, env = (json.loads(line) for line in lines)
    assert welcome == [1, 5, ["kill:rank=0,step=99"]]
    assert {"beat": 0.1, "operation": 60.0, "generation": 3600.0, "cut": 2.0}.items() <= json.loads(
        env.pop("CONFIG")
    ).items()
    assert Membership.of(membership).generation == 3
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "OMP_NUM_THREADS": "1",
        "WINDTUNNEL_RUN": str(played.run),
        "MORE": "1",
    }
    assert expected.items() <= env.items()
    assert env["WINDTUNNEL_AGENT"].startswith("unix:")


def test_ends_are_reported_with_the_last_words(join: Any) -> None:
    played = join("print('o' + 'ut'); raise ValueError('boom')")
    started = played.hear("worker", what="started")
    ended = played.hear("worker", what="exit")
    assert ended["pid"] == started["pid"]
    assert (ended["rank"], ended["generation"], ended["status"], ended["signal"]) == (0, 1, 1, None)
    assert ended["error"].endswith("ValueError: boom")
    assert "out" not in ended["error"]
    until(lambda: (played.tmp / "stdout").read_text() == "out\n")


def test_a_script_that_ends_well_is_done(play: Any) -> None:
    played = play("print('x')")
    played.accept()
    played.member(1, place=1, mine=(1,))
    done = played.hear("done")
    assert (done["generation"], done["rank"], done["result"]) == (1, 1, None)
    assert played.hear("worker", what="exit")["status"] == 0
    until(lambda: (played.tmp / "stdout").read_text() == "[rank 1] x\n")


def test_ranks_of_a_host_post_together(play: Any) -> None:
    text = (
        SPEAKER
        + """
link.agree(1, "k", os.environ["LOCAL_RANK"], 60)
os._exit(0)
"""
    )
    played = play(text)
    played.accept()
    played.member(1, per_host=2, place=1, mine=(2, 3))
    assert played.hear("post")["values"] == {2: "0", 3: "1"}
    played.say(op="decided", generation=1, key="k", values={"2": "0", "3": "1"})
    played.hear("done")


def test_words_that_wait_for_the_supervisor_go_in_one_message(play: Any) -> None:
    """Those of a host's ranks, one each: the first may be under way already."""
    played = play()
    played.accept()
    link = SupervisorLink(
        played.server.address.removeprefix("tcp:"),
        secret.KEYS,
        lambda: Hello("", "", 1),
        lambda message: None,
    )
    for rank in range(8):
        link.meet(1, {f"here/{rank}": ""})
    link.meet(2, {"here/0": ""})
    link.start()
    played.accept()
    meetings = [
        (message["generation"], len(message["said"])) for message in (played.hear("meet") for _ in range(3))
    ]
    assert meetings == [(1, 1), (1, 7), (2, 1)]
    link.close()


def test_it_passes_on_both_ways(join: Any) -> None:
    text = (
        SPEAKER
        + """
print(link.agree(1, "k", [1], 60), flush=True)
print(link.call("ask", "commit/1", 60), flush=True)
link.call("suspect", 1, "gone")
link.event("step", 1, step=4, loss=0.5, rank=0)
link.event("restored", 1, tier="peer", step=4)
link.call("failed", "the reason")
os._exit(1)
"""
    )
    played = join(text)
    assert played.hear("post", generation=1, key="k", values={0: [1]})
    played.say(op="decided", generation=1, key="k", values={"0": [1], "1": [2]})
    assert played.hear("ask", key="commit/1")
    played.answers.put({0: None})
    assert played.hear("suspect", generation=1, rank=0, error="gone")
    step = played.hear("event", kind="step")
    assert (step["step"], step["loss"], step["rank"], step["generation"]) == (4, 0.5, 0, 1)
    assert played.hear("event", kind="restored")["tier"] == "peer"
    assert played.hear("worker", what="exit")["error"] == "the reason"
    assert played.lines("rank-0.gen-1.log", 3)[1:3] == ["{0: [1], 1: [2]}", "{0: None}"]


def test_what_is_open_goes_to_the_next_supervisor(join: Any) -> None:
    text = (
        SPEAKER
        + """
thread = threading.Thread(target=link.agree, args=(1, "k", 1, 60))
thread.start()
print(link.call("ask", "commit/1", 60), flush=True)
link.call("suspect", 1, "e")
link.call("done", 9)
os._exit(0)
"""
    )
    played = join(text)
    played.hear("ask")
    played.die()  # before it answers
    hello = played.accept()
    assert (hello.host, hello.generation, hello.epoch) == (5, 1, 1)
    assert list(hello.workers) == [0]
    played.hear("ask")

    def followed() -> Hello:
        played.die()
        hello: Hello = played.accept()
        return hello

    until(lambda: followed().posts == [Post(1, "k", {0: 1})])
    played.die()
    played.accept(None)
    played.die()  # and one that dies before it welcomes
    played.accept()
    played.hear("ask")
    for _ in range(100):  # those who wait for an answer and are gone get one, too
        played.answers.put(None)
    played.hear("suspect")
    assert played.hear("done")["result"] == 9
    until(lambda: played.status()["workers"] == {})
    played.die()
    hello = played.accept()
    assert hello.workers == {}
    assert played.hear("done")["result"] == 9  # once more: the one before may not have written it down


def test_what_was_decided_is_posted_again_to_the_next_supervisor(join: Any) -> None:
    """The one before may have told some hosts only, or have died before it heard what follows from it."""
    played = join(SPEAKER + 'link.agree(1, "k", 1, 60)\ntime.sleep(600)\n')
    played.hear("post")
    played.say(op="decided", generation=1, key="k", values={"0": 1})
    played.die()
    assert played.accept().posts == [Post(1, "k", {0: 1})]
    played.member(2)
    until(lambda: played.status()["generation"] == 2)
    played.die()
    assert played.accept().posts == []


def test_workers_that_speak_go_on_and_others_are_replaced(play: Any) -> None:
    played = play()
    played.accept()
    played.member(1, mine=(0,))
    first = played.hear("event", kind="here")
    played.member(2, place=1, mine=(1,))
    second = played.hear("event", kind="here")
    assert (first["pid"], second["generation"]) == (second["pid"], 2)
    until(lambda: played.status()["workers"] == {"1": second["pid"]})
    played.member(3, place=1, mine=(1,), restart_all=True)
    third = played.hear("event", kind="here")
    assert third["generation"] == 3
    assert third["pid"] != second["pid"]
    assert not alive(second["pid"])


def test_a_script_that_never_speaks_is_replaced(join: Any) -> None:
    played = join(
        "import os, time; print(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True); time.sleep(600)"
    )
    first = played.hear("worker", what="started")["pid"]
    until(lambda: (played.tmp / "stdout").read_text() == "0\n")
    played.member(2)
    assert played.hear("worker", what="started")["pid"] != first
    until(lambda: (played.tmp / "stdout").read_text() == "0\n1\n")
    assert not alive(first)


def test_what_an_earlier_supervisor_says_is_refused(play: Any) -> None:
    played = play()
    played.accept()
    played.member(4, epoch=2)
    assert played.hear("event", kind="here")["generation"] == 4
    played.member(5, epoch=1)
    played.member(3, epoch=2)
    played.member(6, epoch=2)
    assert played.hear("event", kind="here")["generation"] == 6


def test_a_lost_place_stops_the_workers(join: Any) -> None:
    played = join()
    pid = played.hear("event", kind="here")["pid"]
    played.member(2, place=None, mine=())  # type: ignore[arg-type]
    until(lambda: not alive(pid))
    until(lambda: played.status()["workers"] == {})


def test_a_killed_worker_is_reported_and_awaits_the_supervisor(join: Any) -> None:
    played = join()
    pid = played.hear("event", kind="here")["pid"]
    os.kill(pid, signal.SIGKILL)
    ended = played.hear("worker", what="exit")
    assert (ended["pid"], ended["status"], ended["signal"]) == (pid, None, 9)
    until(lambda: played.status()["workers"] == {})
    played.member(2)
    assert played.hear("event", kind="here")["generation"] == 2


def test_a_stopped_worker_is_frozen_then_fenced(join: Any) -> None:
    """In between the agent is asked whom its host reaches: the network's silence is another matter."""
    played = join()
    pid = played.hear("event", kind="here")["pid"]
    os.kill(pid, signal.SIGSTOP)
    frozen = played.hear("worker", what="frozen")
    assert (frozen["rank"], frozen["pid"]) == (0, pid)
    assert "stopped" in frozen["error"]
    here = played.server.address.removeprefix("tcp:")
    with socket.create_server(("127.0.0.1", 0)) as full:
        full.listen(0)  # what comes beyond its queue gets no answer
        deaf = f"127.0.0.1:{full.getsockname()[1]}"
        with socket.create_connection(full.getsockname()):
            played.say(op="look", round=7, hosts={"1": here, "2": deaf}, within=0.2)
            assert played.hear("reached", round=7)["silent"] == [2]
    played.say(op="fence", rank=0, pid=pid)
    assert played.hear("worker", what="exit")["signal"] == 9
    assert not alive(pid)


def test_a_stopped_script_that_never_speaks_is_frozen(join: Any) -> None:
    """It has no heartbeat: the kernel says that it stands."""
    played = join("import time; time.sleep(600)", frozen_after=0.2)
    pid = played.hear("worker", what="started")["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert played.hear("worker", what="frozen")["pid"] == pid


def test_a_worker_that_holds_the_interpreter_is_not_frozen_at_once(join: Any) -> None:
    """A long C call keeps the heartbeat from running: sum of a range holds Python's lock for more than a
    lease."""
    text = (
        SPEAKER
        + """
import ctypes
ctypes.PyDLL(None).usleep(900_000)  # holds the lock, as a careless extension does
link.event("through", 1)
time.sleep(600)
"""
    )
    played = join(text, frozen_after=0.3)
    played.hear("event", kind="through")
    assert not [message for message in played.heard_before if message.get("what") == "frozen"]


def test_one_that_never_answers_is_given_up(join: Any) -> None:
    played = join(
        SPEAKER + "import ctypes; ctypes.PyDLL(None).sleep(600)", frozen_after=0.2, deadlines={"stuck": 0.5}
    )
    assert "does not answer" in played.hear("worker", what="frozen")["error"]


def test_the_fork_server_dies_with_a_worker_running(join: Any) -> None:
    played = join()
    pid = played.hear("event", kind="here")["pid"]
    played.keeper.process.kill()
    played.keeper.process.wait()
    os.kill(pid, signal.SIGKILL)
    ended = played.hear("worker", what="exit")  # nobody knows how: the fork server would have
    assert (ended["pid"], ended["status"], ended["signal"]) == (pid, None, None)
    played.member(2)
    until(played.keeper.tend)
    assert played.hear("event", kind="here")["generation"] == 2


@pytest.mark.parametrize("status", [0, 1])
def test_end_leaves_nothing(join: Any, status: int) -> None:
    played = join()
    pid = played.hear("event", kind="here")["pid"]
    if status == 0:
        (played.run / "stop").touch()
        played.hear("done")
    played.say(op="end", status=status, reason="a test")
    assert played.process.wait(PATIENCE) == status
    assert not alive(pid)
    assert list(played.memory.iterdir()) == []
    assert not (played.run / "agents" / "agent.json").exists()
    assert (played.tmp / "stderr").read_text() == ""


def test_sigterm_ends_in_order(join: Any) -> None:
    played = join()
    pid = played.hear("event", kind="here")["pid"]
    played.process.terminate()
    assert played.process.wait(PATIENCE) == 1
    assert not alive(pid)
    assert list(played.memory.iterdir()) == []


def test_an_orphan_ends_by_itself(play: Any) -> None:
    played = play(orphan_after=2.0)  # a busy machine lets a beat wait
    played.accept()
    played.member(1)
    pid = played.hear("event", kind="here")["pid"]
    played.server.close()
    assert played.process.wait(PATIENCE) == 1
    assert not alive(pid)
    assert list(played.memory.iterdir()) == []


def test_a_dead_agent_takes_its_workers_along(join: Any) -> None:
    played = join("import time; time.sleep(600)")
    pid = played.hear("worker", what="started")["pid"]
    played.process.kill()
    until(lambda: not alive(pid))


def test_a_host_fault_kills_all_of_the_host(join: Any) -> None:
    text = (
        SPEAKER
        + """
open(os.path.join(os.path.dirname(os.environ["WINDTUNNEL_AGENT"][5:]), "shard"), "w").write("x")
link.event("injected", 1, fault="f")
link.call("inject", "kill")
time.sleep(600)
"""
    )
    played = join(text)
    pid = played.hear("worker", what="started")["pid"]
    assert played.hear("event", kind="injected")["fault"] == "f"
    assert played.process.wait(PATIENCE) == -9
    until(lambda: not alive(pid))
    assert list(played.memory.iterdir()) == []


def test_a_link_that_is_shared_is_not_cut(join: Any) -> None:
    played = join(SPEAKER + 'link.call("inject", "down")\ntime.sleep(600)\n')
    assert "network is shared" in played.hear("event", kind="note")["text"]


def test_long_output_comes_whole(join: Any) -> None:
    played = join("import sys\nfor i in range(2000): print('x' * 100, i)\nprint('no end', end='')")
    played.hear("worker", what="exit")
    expected = "".join(f"{'x' * 100} {i}\n" for i in range(2000)) + "no end\n"
    until(lambda: (played.tmp / "stdout").read_text() == expected)
    assert (played.run / "logs" / "rank-0.gen-1.log").read_text() == expected[:-1]


def test_an_agent_says_nothing_to_a_supervisor_that_does_not_know_the_secret(play: Any) -> None:
    played = play(STAYS)
    played.accept()
    played.die(Keys(b"some other secret"))
    with pytest.raises(queue.Empty):
        played._came.get(timeout=1.0)
    played.die()
    played.accept()
    # What it does not understand is noted, and ends nothing: a membership of nobody.
    played.say(op="membership", membership={"generation": 2}, place=None, mine=[])
    assert "Error" in played.hear("event", kind="note")["text"]
    played.member(1)
    played.hear("event", kind="here", generation=1)
