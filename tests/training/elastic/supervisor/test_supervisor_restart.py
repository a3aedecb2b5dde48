"""A supervisor that dies is followed by another, which goes on from the log; never are there two."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_agents import Agent, Run, a_run, begun, snapshot

from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.base.processes import Adopted, Identity
from windtunnel.store import eventlog
from windtunnel.training.elastic.live import supervisor
from windtunnel.training.elastic.live.calls import Post, Supervision
from windtunnel.training.elastic.live.supervisor import Lead
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.elastic.policy.state import Deadlines

PATIENT = Deadlines(grace=20.0, back=20.0, suspect=0.1, end=2.0)


def restart(run: Run) -> None:
    """The supervisor goes as in a crash, and the next one takes up the run."""
    run.supervisor.abandon()
    assert run.outcome().reason == "abandoned"
    run.supervise()


def back(run: Run, agents: list[Agent]) -> None:
    """All agents are connected to the present supervisor."""
    epoch = snapshot(run.supervisor)["epoch"]
    for agent in agents:
        until(lambda a=agent: a.of("welcome", epoch=epoch), "a welcome")  # type: ignore[misc]


def agree(run: Run, key: str) -> None:
    """The control plane works: all ranks agree on something."""
    members = [agent for agent in run.agents if agent.place is not None and not agent.ended.is_set()]
    for agent in members:
        for rank in agent.workers:
            agent.post(key, rank, None)
    for agent in members:
        until(lambda a=agent: a.of("decided", key=key), key)  # type: ignore[misc]


def test_nothing_missing_no_new_generation(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=PATIENT, hosts=3) as (run, agents):
        address = run.supervisor.address
        for _ in range(3):
            restart(run)
            back(run, agents)
        assert run.supervisor.address == address
        agree(run, "x")
        assert snapshot(run.supervisor)["epoch"] == 4
        assert len(run.events("decided")) == 1 and not run.events("lost")
        assert snapshot(run.supervisor)["spares"] == [2]


def test_open_posts_and_durable_agreements_come_over(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=PATIENT) as (run, agents):
        agree(run, "commit/1")
        agents[0].post("commit/2", 0, "a")
        agents[0].outstanding = [Post(1, "commit/2", {0: "a"})]
        restart(run)
        back(run, agents)
        agents[1].post("commit/2", 1, "b")
        decided = until(lambda: agents[0].of("decided", key="commit/2"), "the agreement")
        assert decided[0]["values"] == {"0": "a", "1": "b"}
        restart(run)
        back(run, agents)
        for key, values in (("commit/1", {0: None, 1: None}), ("commit/2", {0: "a", 1: "b"})):
            assert agents[0].ask(key) == values


def test_a_supervisor_that_dies_while_a_step_is_made_whole_in_storage(tmp_path: Path) -> None:
    """It knew that all shards are there; the next one hears it from the agents, and then that it is whole."""
    with begun(tmp_path, 2, deadlines=PATIENT) as (run, agents):
        key = "persist/7/1"
        for agent in agents:
            agent.post(key, agent.place, None)
            agent.outstanding = [Post(1, key, {agent.place: None})]
        until(lambda: agents[0].of("decided", key=key), key)
        whole = {"key": key, "step": 7, "course": 1, "check": "c"}
        for epoch in (2, 3):  # the second one hears again what is in the log
            restart(run)
            back(run, agents)
            until(lambda e=epoch: agents[0].of("decided", key=key, epoch=e), key)  # type: ignore[misc]
            agents[0].event("persisted", **whole)
            assert agents[0].ask("record/storage/7") == {0: "durable"}
        assert len(run.events("persisted")) == 1


def test_what_is_committed_and_stored_is_the_logs_to_say(tmp_path: Path) -> None:
    """Nobody else writes it; and the next supervisor knows it, too."""
    with begun(tmp_path, 2, deadlines=PATIENT) as (run, agents):
        for agent in agents:
            for kind in ("committed", "persisted"):
                forged = {"step": 99, "course": 1, "check": "x", "key": "persist/99/1"}
                agent.event(kind, generation=1, **forged)
        for key, posts in (
            ("checkpoint/7/1", [{"holders": {}, "course": 1}] * 2),
            ("checkpoint/8/1", [{"holders": {}, "course": 1}] * 2),
            ("checkpoint/9/1", [{"holders": {}, "course": course} for course in (1, 2)]),
            ("checkpoint/x/1", ["nonsense", 7]),
            ("persist/7/1", [None, None]),
        ):
            for agent in agents:
                agent.post(key, agent.place, posts[agent.place])
            until(lambda k=key: agents[0].of("decided", key=k), key)  # type: ignore[misc]
        for agent in (*agents, agents[0]):  # of place 0 it is believed, once
            agent.event("persisted", key="persist/7/1", step=7, course=1, check="c", generation=1)
        agents[1].event("storage.wanted", generation=1, step=8, url="memory://s")
        agree(run, "all is said")
        for _ in range(2):
            known = [{"step": step, "course": 1} for step in (7, 8)]
            stored = [{"step": 7, "course": 1, "check": "c"}]
            said = {"committed": known, "persisted": stored, "newest": 8, "due": 8}
            assert agents[1].ask("record/checkpoints") == {0: said}
            restart(run)
            back(run, agents)
        assert [event["step"] for event in run.events("committed")] == [7, 8]
        assert len(run.events("persisted")) == 1


@pytest.mark.parametrize("there", [False, True])
def test_a_run_whose_last_checkpoint_is_not_in_storage_has_not_reached_it(
    tmp_path: Path, there: bool
) -> None:
    """The next supervisor knows what was wanted and what failed; another generation's word does not count."""
    with begun(tmp_path, 1, deadlines=PATIENT) as (run, (agent,)):
        for step in (3, 7):
            agent.event("storage.wanted", generation=1, step=step, rank=0)
        for step, generation in ((7, 0), (3, 1), *(() if there else ((7, 1),))):
            agent.event("storage.failed", generation=generation, step=step, error="it is full")
        agree(run, "all is said")
        if there:
            agent.post("persist/7/1", 0, [])
            until(lambda: agent.of("decided", key="persist/7/1"), "all shards")
            agent.event("persisted", key="persist/7/1", step=7, course=1, check="c", generation=1)
            agree(run, "all is heard")
        restart(run)
        back(run, [agent])
        for step, known in ((3, "storage.failed"), (7, "durable" if there else "storage.failed"), (8, "")):
            assert agent.ask(f"record/storage/{step}") == {0: known}
        agent.say("done", generation=1, rank=0)
        outcome = run.outcome()
        assert outcome.status == (0 if there else 3)
        why = "step 7, the last checkpoint that was due to storage, is not there: it is full"
        assert outcome.reason == ("all ranks are done" if there else why)


def test_a_host_that_died_meanwhile_is_lost(tmp_path: Path) -> None:
    deadlines = Deadlines(back=1.5, end=2.0)
    with begun(tmp_path, 2, deadlines=deadlines, lease=1.5, hosts=3) as (run, agents):
        run.supervisor.abandon()
        run.outcome()
        agents[1].kill()
        run.supervise()
        run.formed(2, [agents[0], agents[2]])
        assert agents[2].place == 1 and run.events("lost")[0]["evidence"] == "lease"
        assert "host 1 (place 1) is lost" in run.events("decided")[1]["reason"]


def test_a_loss_that_was_known_but_not_acted_on(tmp_path: Path) -> None:
    """Dead between the loss and the decision."""
    with a_run(tmp_path, 2, deadlines=PATIENT, settle=60.0) as run:
        agents = run.add(2)
        run.supervisor.abandon()
        run.outcome()
        run.settings["settle"] = 0.02
        run.supervise()
        run.formed(1)
        run.settings["settle"] = 60.0
        restart(run)
        back(run, agents)
        agents[1].exit(1, signal=9)
        until(lambda: run.events("lost"), "the loss")
        run.settings["settle"] = 0.02
        restart(run)
        run.formed(2)
        assert len(run.events("lost")) == 1 and len(run.events("decided")) == 2


def test_a_supervisor_that_is_abandoned_in_the_middle_of_a_turn_finishes_nothing(tmp_path: Path) -> None:
    with begun(tmp_path, 1, deadlines=PATIENT) as (run, agents):
        leaving = run.supervisor
        with leaving._lock:  # for which its turn waits
            leaving._changed.set()
            until(lambda: not leaving._changed.is_set(), "a turn")
            leaving.abandon()
        restart(run)
        back(run, agents)
        assert not run.events("finished") and not agents[0].ended.is_set()


def test_an_attendance_is_over_with_its_supervisor(tmp_path: Path) -> None:
    """What is said late is not taken for another host's, which attends by the same number now."""
    with a_run(tmp_path, 1, deadlines=PATIENT) as run:
        (agent,) = run.add()
        before = agent.of("welcome")[0]["link"]
        restart(run)
        back(run, [agent])
        with pytest.raises(OSError, match="this attendance is over"):
            agent._calls.call(Supervision, "beat", "", before)


def test_a_decision_that_nobody_got(tmp_path: Path) -> None:
    """Dead between the log and the agents: what was decided under an old epoch is not sent again."""
    with begun(tmp_path, 2, deadlines=PATIENT) as (run, agents):
        run.supervisor.abandon()
        run.outcome()
        agents[1].generation = 0
        run.supervise()
        run.formed(2)
        decided = run.events("decided")
        assert [e["membership"]["epoch"] for e in decided] == [1, 2]
        assert [e["membership"]["generation"] for e in decided] == [1, 2]


def test_hosts_on_order_are_waited_for_by_the_next_one(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(back=20.0, end=2.0)) as (run, agents):
        agents[0].kill()
        until(lambda: run.ordered == [1], "the order")
        restart(run)
        back(run, agents[1:])
        (new,) = run.add()
        run.formed(2, [agents[1], new])
        assert run.ordered == [1] and new.host == 2 and new.place == 0


def test_results_and_the_dead_are_remembered(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(back=20.0, suspect=0.05, end=2.0), hosts=3) as (run, agents):
        agents[0].kill()
        run.formed(2, agents[1:])
        agents[2].done(result="first")
        until(lambda: run.events("done"), "a result")
        agents[2].workers.clear()  # it is done and has ended: that is no loss
        restart(run)
        back(run, agents[1:])
        ghost = run.add(returns=False)[0]
        assert ghost.host == 3  # ids are never used again
        agents[1].done(result="second")
        assert run.outcome().results == {0: "first", 1: "second"}


def test_a_worker_that_ended_while_nobody_supervised(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=PATIENT) as (run, agents):
        run.supervisor.abandon()
        run.outcome()
        del agents[1].workers[1]
        run.supervise()
        run.formed(2)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    with begun(tmp_path, 1, deadlines=PATIENT) as (run, (agent,)):
        run.supervisor.abandon()
        run.outcome()
        path = tmp_path / "events.jsonl"
        whole = len(eventlog.read(path))
        with path.open("ab") as file:
            file.write(b'{"kind":"lost","what":"host","host":0')
        assert len(eventlog.read(path)) == whole
        run.supervise()
        back(run, [agent])
        agree(run, "x")
        assert len(eventlog.read(path)) == whole + 1  # "started"


@pytest.mark.parametrize("cut", range(0, 400, 37))
def test_a_log_cut_anywhere_can_be_read_and_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    first = eventlog.EventLog(path, epoch=1)
    for number in range(5):
        first.append("step", generation=1, step=number)
    first.close()
    content = path.read_bytes()
    path.write_bytes(content[: min(cut, len(content))])
    kept = len(eventlog.read(path))
    second = eventlog.EventLog(path, epoch=2)
    second.append("step", generation=1, step=9)
    second.close()
    steps = [event["step"] for event in eventlog.read(path)]
    assert steps == [*range(kept), 9]


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('hello\n{"kind": "x"}\n')
    with pytest.raises(UserError, match=r"events\.jsonl: line 1 is not an event"):
        Run(tmp_path, 1)


def test_two_cannot_lead_a_run(tmp_path: Path) -> None:
    """Also not two of one process; who has died does not lead."""
    code = "import sys, pathlib\nfrom windtunnel.training.elastic.live.supervisor import Lead\n"
    code += "lead = Lead(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        sentence = f"this run is running, process {other.pid} on {platform.node()} leads it"
        with pytest.raises(UserError, match=sentence):
            Lead(tmp_path)
        other.kill()
    lead = Lead(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        Lead(tmp_path)
    lead.release()
    Lead(tmp_path).release()


def test_an_agent_of_a_later_supervisor_is_none_of_an_older_ones(tmp_path: Path) -> None:
    """Who follows an older copy of the log ends nothing of it."""
    with begun(tmp_path, 2, Rules("shrink")) as (run, agents):
        agents[0].epoch = 7
        agents[0].cut()
        run.formed(2, [agents[1]])
        assert [event["host"] for event in run.events("lost")] == [0] and not agents[0].ended.is_set()


def test_a_process_id_that_is_used_again_is_of_another() -> None:
    own = Identity.own()
    assert Adopted(replace(own, started=own.started + 1)).poll() == -1


def test_where_the_hosts_look_for_the_next_one_somebody_else_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PATIENCE", 0.2)
    log = eventlog.EventLog(tmp_path / eventlog.NAME, epoch=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        log.append("started", generation=0, config={}, address=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UserError, match=r"in use.*, and the hosts of this run look for it there"):
            Run(tmp_path, 1)
    log.close()
