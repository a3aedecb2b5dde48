"""The agent against a supervisor that a test plays: what it starts, passes on, refuses, and leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from host_helpers import SPEAKER, STAYS, alive, environment, script

from support import secret
from support.waiting import PATIENCE, until
from windtunnel.base import wire
from windtunnel.base.keys import Keys
from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.model import MemberHost, Membership
from windtunnel.training.elastic.spec import JobSpec

WELCOME = {"op": "welcome", "host": 5, "beat": 0.05, "lease": 5.0}


JOB: dict[str, Any] = {
    "frozen_after": 0.4,
    "orphan_after": 30.0,
    "faults": ("kill:rank=0,step=99",),
    "preload": (),
}


class Played:
    """A supervisor, by hand, for one agent process."""

    def __init__(self, tmp_path: Path, text: str, **changes: Any) -> None:
        self.tmp = tmp_path
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        self.run = tmp_path / "run"
        self.run.mkdir()
        self.memory = Path(f"/dev/shm/windtunnel-test-{os.getpid()}-{tmp_path.name[-12:]}")
        self.memory.mkdir()
        self.keeper = ForkServerKeeper(tmp_path / "z", (), environment())
        names = {one.name for one in fields(AgentConfig)}
        own = {name: changes.pop(name) for name in names & set(changes)}
        config = AgentConfig(
            run=str(self.run),
            secret=secret.kept(tmp_path),
            supervisor=f"127.0.0.1:{self.listener.getsockname()[1]}",
            job=JobSpec(script(tmp_path, text), **{**JOB, **changes}),
            memory_root=str(self.memory),
            **{"forkserver": str(self.keeper.path), **own},
        )
        config.write(tmp_path / "agent.config")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "windtunnel.training.host", str(tmp_path / "agent.config")],
            env=environment(),
            stdout=(tmp_path / "stdout").open("wb"),
            stderr=(tmp_path / "stderr").open("wb"),
        )
        self.sock: socket.socket

    def accept(self, welcome: dict[str, Any] | None = WELCOME) -> dict[str, Any]:
        """The agent's hello, on a new connection."""
        self.sock = secret.admitted(self.listener, "supervisor")
        self.sock.settimeout(30)
        hello, _ = wire.receive(self.sock)
        if welcome is not None:
            self.say(**welcome)
        return hello

    def say(self, **message: Any) -> None:
        wire.send(self.sock, message)

    def hear(self, op: str, **fields: Any) -> dict[str, Any]:
        """The next message ``op`` with these fields; others are passed over."""
        while True:
            message, _ = wire.receive(self.sock)
            if message["op"] == op and fields.items() <= message.items():
                return message

    def member(
        self, generation: int, epoch: int = 1, *, place: int = 0, mine: Any = (0,), **more: Any
    ) -> None:
        hosts = (MemberHost(5, "127.0.0.1", ""), MemberHost(6, "127.0.0.1", ""))
        per_host = more.pop("per_host", 1)
        membership = Membership(generation, epoch, hosts, per_host, "127.0.0.1:1", "a test", **more)
        self.say(op="membership", membership=membership.plain(), place=place, mine=list(mine))

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
        for close in (self.process.kill, self.process.wait, self.listener.close, self.keeper.close):
            close()
        with contextlib.suppress(AttributeError):
            self.sock.close()
        subprocess.run(["rm", "-rf", str(self.memory)], check=True)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Any]:
    played: list[Played] = []

    def begin(text: str = STAYS, **changes: Any) -> Played:
        played.append(Played(tmp_path, text, **changes))
        return played[0]

    yield begin
    for one in played:
        one.end()


def test_it_says_who_it_is_and_beats(play: Any) -> None:
    played = play(address="127.0.0.9", domain="rack-1")
    hello = played.accept()
    assert hello | {"pid": 0} == {
        "op": "hello",
        "host": None,
        "address": "127.0.0.9",
        "memory": hello["memory"],
        "domain": "rack-1",
        "pid": 0,
        "generation": 0,
        "epoch": 0,
        "workers": {},
        "posts": [],
    }
    assert hello["pid"] == played.process.pid
    played.hear("beat")
    played.hear("beat")


def test_workers_get_their_environment_and_their_welcome(play: Any) -> None:
    text = SPEAKER + "print(json.dumps(dict(os.environ)), flush=True)\n"
    played = play(text, env={"MORE": "1"}, arguments=("--a",))
    played.accept()
    played.member(3, place=1, mine=(2, 3), per_host=2)
    for _ in range(2):
        played.hear("worker", what="exit", status=0)
    lines = played.lines("rank-3.gen-3.log", 2)
    welcome, env = (json.loads(line) for line in lines)
    assert welcome["op"] == "welcome"
    assert (welcome["place"], welcome["host"], welcome["rank"], welcome["local_rank"]) == (1, 5, 3, 1)
    assert welcome["config"] == {
        "beat": 0.1,
        "operation": 60.0,
        "generation": 3600.0,
        "cut": 2.0,
    }
    assert welcome["faults"] == ["kill:rank=0,step=99"]
    assert Membership.of(welcome["membership"]).generation == 3
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": Membership.of(welcome["membership"]).store.removeprefix("127.0.0.1:"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "OMP_NUM_THREADS": "1",
        "WINDTUNNEL_RUN": str(played.run),
        "MORE": "1",
    }
    assert expected.items() <= env.items()
    assert env["WINDTUNNEL_AGENT"].startswith("unix:")


def test_ends_are_reported_with_the_last_words(play: Any) -> None:
    played = play("print('o' + 'ut'); raise ValueError('boom')")
    played.accept()
    played.member(1)
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
    assert played.hear("done") == {"op": "done", "generation": 1, "rank": 1, "result": None}
    assert played.hear("worker", what="exit")["status"] == 0
    until(lambda: (played.tmp / "stdout").read_text() == "[rank 1] x\n")


def test_ranks_of_a_host_post_together(play: Any) -> None:
    text = (
        SPEAKER
        + """
say(op="post", generation=1, key="k", rank=int(os.environ["RANK"]), value=os.environ["LOCAL_RANK"])
wire.receive(sock)
os._exit(0)
"""
    )
    played = play(text)
    played.accept()
    played.member(1, per_host=2, place=1, mine=(2, 3))
    assert played.hear("post")["values"] == {"2": "0", "3": "1"}
    played.say(op="decided", generation=1, key="k", values={"2": "0", "3": "1"})
    played.hear("done")


def test_it_passes_on_both_ways(play: Any) -> None:
    text = (
        SPEAKER
        + """
say(op="post", generation=1, key="k", rank=0, value=[1])
print(json.dumps(wire.receive(sock)[0]), flush=True)
say(op="ask", generation=1, key="commit/1")
print(json.dumps(wire.receive(sock)[0]), flush=True)
say(op="suspect", generation=1, rank=0, error="gone")
say(op="step", step=4, loss=0.5, rank=0)
say(op="event", kind="restored", tier="peer", step=4)
say(op="failed", error="the reason")
os._exit(1)
"""
    )
    played = play(text)
    played.accept()
    played.member(1)
    post = played.hear("post")
    assert post == {"op": "post", "generation": 1, "key": "k", "values": {"0": [1]}}
    played.say(op="decided", generation=1, key="k", values={"0": [1], "1": [2]})
    assert played.hear("ask") == {"op": "ask", "generation": 1, "key": "commit/1"}
    played.say(op="answer", generation=1, key="commit/1", values={"0": None})
    assert played.hear("suspect") == {"op": "suspect", "generation": 1, "rank": 0, "error": "gone"}
    step = played.hear("event", kind="step")
    assert (step["step"], step["loss"], step["rank"], step["generation"]) == (4, 0.5, 0, 1)
    assert played.hear("event", kind="restored")["tier"] == "peer"
    assert played.hear("worker", what="exit")["error"] == "the reason"
    lines = played.lines("rank-0.gen-1.log", 3)
    assert json.loads(lines[1])["values"] == {"0": [1], "1": [2]}
    assert json.loads(lines[2])["values"] == {"0": None}


def test_last_words_that_the_end_overtook(play: Any) -> None:
    """A child in a session of its own holds the worker's connection, and speaks for it when it is gone."""
    text = (
        SPEAKER
        + """
there, told = os.pipe()
with lock: child = os.fork()
if child:
    os.read(there, 1)
    os._exit(1)
os.setsid()
os.write(told, b"x")
time.sleep(0.2)
say(op="suspect", generation=1, rank=0, error="gone")
say(op="failed", error="the reason")
os._exit(0)
"""
    )
    played = play(text)
    played.accept()
    played.member(1)
    assert played.hear("suspect")["error"] == "gone"
    ended = played.hear("worker", what="exit")
    assert (ended["status"], ended["error"]) == (1, "the reason")


def test_what_is_open_goes_to_the_next_supervisor(play: Any) -> None:
    text = (
        SPEAKER
        + """
say(op="post", generation=1, key="k", rank=0, value=1)
say(op="ask", generation=1, key="commit/1")
print(wire.receive(sock)[0]["op"], flush=True)
say(op="suspect", generation=1, rank=0, error="e")
say(op="done", result=9)
os._exit(0)
"""
    )
    played = play(text)
    played.accept()
    played.member(1)
    played.hear("post")
    played.sock.close()
    hello = played.accept()
    assert (hello["host"], hello["generation"], hello["epoch"]) == (5, 1, 1)
    assert list(hello["workers"]) == ["0"]
    assert hello["posts"] == [{"generation": 1, "key": "k", "values": {"0": 1}}]
    played.hear("ask")
    played.sock.close()  # dies before it answers
    played.accept(None)
    played.sock.close()  # and one that dies before it welcomes
    played.accept()
    played.hear("ask")
    played.say(op="answer", generation=1, key="commit/1", values=None)
    played.hear("suspect")
    assert played.hear("done")["result"] == 9
    played.sock.close()
    hello = played.accept()
    assert hello["workers"] == {}
    assert played.hear("done")["result"] == 9  # once more: the one before may not have written it down


def test_what_was_decided_is_posted_again_to_the_next_supervisor(play: Any) -> None:
    """The one before may have told some hosts only, or have died before it heard what follows from it."""
    said = '\nsay(op="post", generation=1, key="k", rank=0, value=1)\nwire.receive(sock)\nsock.recv(1)\n'
    played = play(SPEAKER + said)
    played.accept()
    played.member(1)
    played.hear("post")
    played.say(op="decided", generation=1, key="k", values={"0": 1})
    played.sock.close()
    hello = played.accept()
    assert hello["posts"] == [{"generation": 1, "key": "k", "values": {"0": 1}}]
    played.member(2)
    played.sock.close()
    assert played.accept()["posts"] == []


def test_workers_that_speak_go_on_and_others_are_replaced(play: Any) -> None:
    played = play()
    played.accept()
    played.member(1, mine=(0,))
    first = played.hear("event", kind="here")
    played.member(2, place=1, mine=(1,))
    second = played.hear("event", kind="here")
    assert (first["pid"], second["generation"]) == (second["pid"], 2)
    assert played.status()["workers"] == {"1": second["pid"]}
    played.member(3, place=1, mine=(1,), restart_all=True)
    third = played.hear("event", kind="here")
    assert third["generation"] == 3
    assert third["pid"] != second["pid"]
    assert not alive(second["pid"])


def test_a_script_that_never_speaks_is_replaced(play: Any) -> None:
    played = play(
        "import os, time; print(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True); time.sleep(600)"
    )
    played.accept()
    played.member(1)
    first = played.hear("worker", what="started")["pid"]
    until(lambda: (played.tmp / "stdout").read_text() == "1\n")
    played.member(2)
    assert played.hear("worker", what="started")["pid"] != first
    until(lambda: (played.tmp / "stdout").read_text() == "1\n2\n")
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


def test_a_lost_place_stops_the_workers(play: Any) -> None:
    played = play()
    played.accept()
    played.member(1)
    pid = played.hear("event", kind="here")["pid"]
    played.member(2, place=None, mine=())  # type: ignore[arg-type]
    until(lambda: not alive(pid))
    until(lambda: played.status()["workers"] == {})


def test_a_killed_worker_is_reported_and_awaits_the_supervisor(play: Any) -> None:
    played = play()
    played.accept()
    played.member(1)
    pid = played.hear("event", kind="here")["pid"]
    os.kill(pid, signal.SIGKILL)
    ended = played.hear("worker", what="exit")
    assert (ended["pid"], ended["status"], ended["signal"]) == (pid, None, 9)
    played.hear("beat")
    assert played.status()["workers"] == {}
    played.member(2)
    assert played.hear("event", kind="here")["generation"] == 2


def test_a_stopped_worker_is_frozen_then_fenced(play: Any) -> None:
    """In between the agent is asked whom its host reaches: the network's silence is another matter."""
    played = play()
    played.accept()
    played.member(1)
    pid = played.hear("event", kind="here")["pid"]
    os.kill(pid, signal.SIGSTOP)
    frozen = played.hear("worker", what="frozen")
    assert (frozen["rank"], frozen["pid"]) == (0, pid)
    assert "stopped" in frozen["error"]
    here = f"127.0.0.1:{played.listener.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as full:
        full.listen(0)  # what comes beyond its queue gets no answer
        deaf = f"127.0.0.1:{full.getsockname()[1]}"
        with socket.create_connection(full.getsockname()):
            played.say(op="look", round=7, hosts={"1": here, "2": deaf}, within=0.2)
            assert played.hear("reached", round=7)["silent"] == [2]
    played.say(op="fence", rank=0, pid=pid)
    assert played.hear("worker", what="exit")["signal"] == 9
    assert not alive(pid)


def test_a_worker_that_holds_the_interpreter_is_not_frozen_at_once(play: Any) -> None:
    """A long C call keeps the heartbeat from running: sum of a range holds Python's lock for more than a
    lease."""
    text = (
        SPEAKER
        + """
import ctypes
ctypes.PyDLL(None).usleep(900_000)  # holds the lock, as a careless extension does
say(op="event", kind="through")
time.sleep(600)
"""
    )
    played = play(text, frozen_after=0.3)
    played.accept()
    played.member(1)
    while True:
        message, _ = wire.receive(played.sock)
        assert message.get("what") != "frozen"
        if message.get("kind") == "through":
            return


def test_one_that_never_answers_is_given_up(play: Any) -> None:
    played = play(
        SPEAKER + "import ctypes; ctypes.PyDLL(None).sleep(600)", frozen_after=0.2, deadlines={"stuck": 0.5}
    )
    played.accept()
    played.member(1)
    assert "does not answer" in played.hear("worker", what="frozen")["error"]


def test_the_fork_server_dies_with_a_worker_running(play: Any) -> None:
    played = play()
    played.accept()
    played.member(1)
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
def test_end_leaves_nothing(play: Any, status: int) -> None:
    played = play()
    played.accept()
    played.member(1)
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


def test_sigterm_ends_in_order(play: Any) -> None:
    played = play()
    played.accept()
    played.member(1)
    pid = played.hear("event", kind="here")["pid"]
    played.process.terminate()
    assert played.process.wait(PATIENCE) == 1
    assert not alive(pid)
    assert list(played.memory.iterdir()) == []


def test_an_orphan_ends_by_itself(play: Any) -> None:
    played = play(orphan_after=0.5)
    played.accept()
    played.member(1)
    pid = played.hear("event", kind="here")["pid"]
    played.listener.close()
    played.sock.close()
    assert played.process.wait(PATIENCE) == 1
    assert not alive(pid)
    assert list(played.memory.iterdir()) == []


def test_a_dead_agent_takes_its_workers_along(play: Any) -> None:
    played = play("import time; time.sleep(600)")
    played.accept()
    played.member(1)
    pid = played.hear("worker", what="started")["pid"]
    played.process.kill()
    until(lambda: not alive(pid))


def test_a_host_fault_kills_all_of_the_host(play: Any) -> None:
    text = (
        SPEAKER
        + """
open(os.path.join(os.path.dirname(os.environ["WINDTUNNEL_AGENT"][5:]), "shard"), "w").write("x")
say(op="event", kind="injected", fault="f")
say(op="inject", action="kill-host")
time.sleep(600)
"""
    )
    played = play(text)
    played.accept()
    played.member(1)
    pid = played.hear("worker", what="started")["pid"]
    assert played.hear("event", kind="injected")["fault"] == "f"
    assert played.process.wait(PATIENCE) == -9
    until(lambda: not alive(pid))
    assert list(played.memory.iterdir()) == []


def test_wiped_and_flipped_memory(play: Any) -> None:
    text = (
        SPEAKER
        + """
folder = os.path.dirname(os.environ["WINDTUNNEL_AGENT"][5:])
slot = os.path.join(folder, "rank3.4.100.0.slot")
open(slot, "wb").write(bytes(4096) + bytes(100))
say(op="inject", action="flip", shard="rank3")
while not any(open(slot, "rb").read()): time.sleep(0.01)
say(op="event", kind="flipped", bits=sum(bin(b).count("1") for b in open(slot, "rb").read()))
say(op="inject", action="wipe-memory")
while os.path.exists(slot): time.sleep(0.01)
say(op="event", kind="wiped")
say(op="inject", action="down")
time.sleep(600)
"""
    )
    played = play(text)
    played.accept()
    played.member(1)
    assert played.hear("event", kind="flipped")["bits"] == 1
    played.hear("event", kind="wiped")
    assert "network is shared" in played.hear("event", kind="note")["text"]


def test_long_output_comes_whole(play: Any) -> None:
    played = play("import sys\nfor i in range(2000): print('x' * 100, i)\nprint('no end', end='')")
    played.accept()
    played.member(1)
    played.hear("worker", what="exit")
    expected = "".join(f"{'x' * 100} {i}\n" for i in range(2000)) + "no end\n"
    until(lambda: (played.tmp / "stdout").read_text() == expected)
    assert (played.run / "logs" / "rank-0.gen-1.log").read_text() == expected[:-1]


def test_an_agent_says_nothing_to_a_supervisor_that_does_not_know_the_secret(play: Any) -> None:
    played = play(STAYS)
    with pytest.raises(ConnectionError, match="closed the connection"):  # it saw the proof, and left
        secret.admitted(played.listener, "supervisor", Keys(b"some other secret"))
    with pytest.raises(ConnectionError):  # nor by a proof of another service
        secret.admitted(played.listener, "store 127.0.0.1:1")
    assert played.accept()["op"] == "hello"
    # What it does not understand ends the connection, and not the agent: a membership of nobody.
    nobody = {"generation": 2, "epoch": 1, "hosts": [], "per_host": 1, "store": "", "cause": ""}
    played.say(op="membership", membership={**nobody, "restart_all": False}, place=None, mine=[])
    assert played.accept()["op"] == "hello"
    played.member(1)
    played.hear("event", kind="here", generation=1)
