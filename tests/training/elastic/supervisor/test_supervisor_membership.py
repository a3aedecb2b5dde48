"""Membership over real sockets: forming, losses of every kind, spares, fencing, agreements, the end."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_agents import Agent, Run, a_run, begun, snapshot

from support import secret
from support.waiting import PATIENCE, until
from windtunnel.base import handshake, remote
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain
from windtunnel.training.elastic.live.calls import Hello, Supervision
from windtunnel.training.elastic.live.supervisor import Supervisor
from windtunnel.training.elastic.policy import core
from windtunnel.training.elastic.policy.rules import Decision, Fence, Observation, Rules, decide
from windtunnel.training.elastic.policy.state import Deadlines


def test_forms_and_ends_with_results(tmp_path: Path) -> None:
    with begun(tmp_path, 2, per_host=2) as (run, agents):
        first = agents[0].of("membership")[0]
        assert first["mine"] == [0, 1] and first["place"] == 0
        agents[0].done(result=7)
        agents[1].exit(2, status=0)  # a plain script says nothing when it is done
        agents[1].say("done", generation=1, rank=3, result=[1])
        outcome = run.outcome()
        assert (outcome.status, outcome.results) == (0, {0: 7, 1: 7, 2: None, 3: [1]})
        assert all(agent.ended.wait(PATIENCE) for agent in agents)
        assert run.events("finished")[0]["status"] == 0


def test_a_worker_lost_makes_a_generation_of_the_same_hosts(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        agents[1].exit(1, signal=9)
        run.formed(2)
        lost = run.events("lost")
        assert [(e["what"], e["rank"], e["place"], e["evidence"], e["own"]) for e in lost] == [
            ("worker", 1, 1, "exit", False)
        ]
        decided = run.events("decided")
        assert len(decided) == 2 and "rank 1 is lost, killed by SIGKILL" in decided[1]["reason"]


def test_losses_that_come_together_are_one_generation(tmp_path: Path) -> None:
    with begun(tmp_path, 4) as (run, agents):
        with run.together():
            for rank in (0, 2, 3):
                agents[rank].exit(rank, signal=9)
        run.formed(2)
        assert len(run.events("decided")) == 2 and len(run.events("lost")) == 3


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    with begun(tmp_path, 2, hosts=3) as (run, agents):
        assert snapshot(run.supervisor)["spares"] == [2]
        agents[0].kill()
        run.formed(2, agents[1:])
        assert [a.place for a in agents[1:]] == [1, 0]
        assert run.events("lost")[0]["evidence"] == "connection"
        assert run.ordered == []


def test_hosts_are_ordered_and_waited_for(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        agents[1].kill()
        until(lambda: run.ordered == [1], "the order")
        run.add()
        run.formed(2, [agents[0], run.agents[2]])
        assert run.agents[2].place == 1 and run.ordered == [1]
        assert snapshot(run.supervisor)["coming"] == 0


def test_hosts_that_never_come_fail_the_run(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(hosts=0.2, end=1.0)) as (run, agents):
        agents[1].kill()
        outcome = run.outcome()
        assert outcome.status == 1 and outcome.reason == "1 hosts were ordered and did not come within 0.2 s"
        assert agents[0].ended.wait(PATIENCE)


def test_nobody_says_hello(tmp_path: Path) -> None:
    with a_run(tmp_path, 2, deadlines=Deadlines(hello=1.0, end=1.0)) as run:
        run.add()
        assert run.outcome().reason == "1 of 2 hosts came within 1 s"


def test_orders_that_fail(tmp_path: Path) -> None:
    def refuse(count: int) -> None:
        raise RuntimeError("no quota")

    with begun(tmp_path, 1, order_hosts=refuse) as (run, (agent,)):
        agent.kill()
        assert run.outcome().reason == "1 hosts could not be ordered: no quota"


def test_shrink_goes_on_and_takes_in_who_comes(tmp_path: Path) -> None:
    with begun(tmp_path, 3, Rules("shrink", minimum=2)) as (run, agents):
        agents[0].kill()
        run.formed(2, agents[1:])
        assert [a.place for a in agents[1:]] == [0, 1]
        (new,) = run.add()
        run.formed(3, [*agents[1:], new])
        assert new.place == 2
        agents[1].kill()
        new.kill()
        assert "at least 2 are needed" in run.outcome().reason


def test_a_silent_agent_is_given_up_and_fenced(tmp_path: Path) -> None:
    """A frozen host: its connection stays, nothing comes; when it wakes up it is told to end."""
    with begun(tmp_path, 2, lease=1.0, hosts=3) as (run, agents):
        agents[1].beats = False
        run.formed(2, [agents[0], agents[2]])
        assert run.events("lost")[0]["evidence"] == "lease"
        assert agents[1].ended.wait(PATIENCE)


def attended(run: Run, hello: Hello) -> list[dict[str, Any]]:
    """What an agent is told that says this, until the supervisor ends it."""
    messages: list[dict[str, Any]] = []
    link = remote.RemoteLink(f"tcp:{run.supervisor.address}", keys=secret.KEYS, timeout=PATIENCE)
    link.call(Supervision, "attend", "", hello, lambda message, _: messages.append(message))
    link.close()
    return messages


def test_a_lost_host_that_comes_back_is_fenced_and_may_join_anew(tmp_path: Path) -> None:
    with begun(tmp_path, 2, hosts=3) as (run, agents):
        old = agents[1]
        old.kill()
        run.formed(2, [agents[0], agents[2]])
        (message,) = attended(run, Hello("h", "m", old.pid, old.host, generation=1))
        assert message["op"] == "end" and "given up" in message["reason"]
        (again,) = run.add()
        assert again.host == 3


def test_another_process_with_a_live_hosts_id_is_refused(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as (run, _):
        assert [message["op"] for message in attended(run, Hello("h", "m", 1, 0))] == ["end"]
        assert snapshot(run.supervisor)["places"] == [0]


def test_a_connection_that_breaks_and_comes_back_changes_nothing(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(grace=20.0)) as (run, agents):
        for _ in range(3):
            count = len(agents[1].of("welcome"))
            agents[1].cut()
            until(lambda n=count: len(agents[1].of("welcome")) > n, "a second welcome")
        agents[0].post("x", 0, "a")
        agents[1].post("x", 1, "b")
        until(lambda: agents[1].of("decided", key="x"), "the agreement")
        assert len(run.events("decided")) == 1 and not run.events("lost")


def test_a_membership_that_was_missed_comes_with_the_next_hello(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(grace=20.0), settle=0.0) as (run, agents):
        agents[1].generation = 0  # it never got it
        agents[1].cut()
        run.formed(1)
        assert len(agents[1].of("membership")) == 2 and len(run.events("decided")) == 1


def test_a_worker_that_is_missing_after_a_reconnection_is_lost(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(grace=20.0, suspect=0.05)) as (run, agents):
        agents[1].workers.clear()
        agents[1].cut()
        run.formed(2)
        assert run.events("lost")[0]["error"] == "it ended unseen"


def test_a_frozen_worker_is_fenced_once(tmp_path: Path) -> None:
    """The exit of the process that was fenced is no second loss."""
    with begun(tmp_path, 2) as (run, agents):
        pid = agents[0].workers[0]
        agents[0].frozen(0)
        run.formed(2)
        assert agents[0].of("fence", rank=0, pid=pid)
        assert agents[0].workers[0] != pid
        agents[0].say("worker", what="exit", rank=0, pid=pid, generation=2, status=None, signal=9)
        agents[0].post("x", 0, 0)
        agents[1].post("x", 1, 0)
        until(lambda: agents[1].of("decided", key="x"), "the agreement")
        assert [e["evidence"] for e in run.events("lost")] == ["frozen"]


def test_own_failures_are_counted_once_a_generation(tmp_path: Path) -> None:
    with begun(tmp_path, 3, Rules(max_own_failures=2)) as (run, agents):
        for generation in (1, 2, 3):
            run.formed(generation)
            with run.together():
                for rank, agent in enumerate(agents):
                    agent.exit(rank, status=1, error="ValueError: bad batch")
        outcome = run.outcome()
        assert "ended by itself 3 times; restarts allowed: 2" in outcome.reason
        assert "ValueError: bad batch" in outcome.reason


def test_wrong_use_is_not_tried_again(tmp_path: Path) -> None:
    with begun(tmp_path, 2, Rules(max_own_failures=5)) as (run, agents):
        agents[1].exit(1, status=2, error="--rate 'fast' is no number")
        assert "refuses what it was given: --rate 'fast'" in run.outcome().reason


def test_what_ends_in_consequence_of_a_loss_is_not_the_programs_fault(tmp_path: Path) -> None:
    with begun(tmp_path, 2, Rules(max_own_failures=0)) as (run, agents):
        for generation in (1, 2, 3):
            run.formed(generation)
            with run.together():
                agents[0].exit(0, signal=9)
                agents[1].exit(1, status=1, error="RuntimeError: connection closed by peer")
        run.formed(4)
        assert snapshot(run.supervisor)["status"] is None


def test_a_suspicion_alone_makes_a_generation_and_is_bounded(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        for generation in (1, 2, 3, 4):
            run.formed(generation)
            agents[1].say("suspect", generation=generation, rank=1, error="timed out")
        reason = run.outcome().reason
        assert "waited for each other in vain 4 times without a new step" in reason
        assert "rank 1: timed out" in reason


def test_hosts_that_do_not_reach_each_other_are_parted(tmp_path: Path) -> None:
    """Both reach the supervisor, so no lease ends. One goes; a suspicion without such a pair costs nobody."""
    with begun(tmp_path, 4, Rules("shrink")) as (run, agents):
        agents[1].silent, agents[2].silent = [agents[2].host], [agents[1].host]  # type: ignore[list-item]
        agents[0].say("suspect", generation=1, rank=0, error="timed out")
        assert agents[2].ended.wait(PATIENCE)
        left = [agents[0], agents[1], agents[3]]
        run.formed(2, left)
        (lost,) = run.events("lost")
        assert (lost["what"], lost["host"], lost["evidence"]) == ("host", agents[2].host, "cut")
        assert "do not reach each other" in agents[2].of("end")[0]["reason"]
        agents[0].say("suspect", generation=2, rank=0, error="timed out")
        run.formed(3, left)
        assert [event["evidence"] for event in run.events("lost")] == ["cut", "suspect"]
        said = [from_plain(Decision, event["decision"]) for event in run.events("decision")]
        assert said.count(Fence(hosts=(agents[2].host,))) == 1  # type: ignore[arg-type]
        assert said == [
            decide(from_plain(Observation, event["observation"])) for event in run.events("decision")
        ]


def test_a_script_that_ends_over_hosts_that_are_cut_goes_on_without_one(tmp_path: Path) -> None:
    """It does not speak of suspicions: its exit over its peers is one."""
    error = "RuntimeError: [gloo/transport/tcp/pair.cc:457] Application timeout caused pair closure"
    with begun(tmp_path, 2) as (run, (first, second)):
        first.silent, second.silent = [second.host], [first.host]  # type: ignore[list-item]
        first.exit(0, status=1, error=error)
        assert second.ended.wait(PATIENCE)
        until(lambda: run.ordered == [1], "an order")
        generation = first.generation + 1
        (new,) = run.add()
        formed = run.formed(generation, [first, new])
        assert formed["places"] == [first.host, new.host]


def test_steps_done_again_clear_no_suspicion(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        for generation in (1, 2, 3, 4):
            run.formed(generation)
            for step in (0, 1, 2):
                agents[1].step(step)
            agents[1].say("suspect", generation=generation, rank=1, error="timed out")
        assert "waited for each other in vain" in run.outcome().reason


def test_steps_that_count_from_the_beginning_in_each_epoch_are_progress(tmp_path: Path) -> None:
    with a_run(tmp_path, 2) as run:
        agents = run.add(2)
        numbers = [0, 1, 2, 0, 1]
        for generation in range(1, 7):
            run.formed(generation)
            for step in numbers:
                agents[1].step(step)
            agents[1].say("suspect", generation=generation, rank=1, error="timed out")
        run.formed(7)


def test_a_step_clears_suspicion(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        for generation in range(1, 7):
            run.formed(generation)
            agents[1].step(generation)
            agents[1].say("suspect", generation=generation, rank=1, error="timed out")
        run.formed(7)


def test_losses_without_a_step_are_bounded(tmp_path: Path) -> None:
    with begun(tmp_path, 1, settle=0.0) as (run, (agent,)):
        for generation in range(1, 32):
            run.formed(generation)
            agent.exit(0, signal=11)
        assert "31 generations ended without a step" in run.outcome().reason


def test_ranks_that_do_not_group_are_fenced(tmp_path: Path) -> None:
    with a_run(tmp_path, 2) as run:
        (grouped,) = run.add()
        (ungrouped,) = run.add(groups=False)
        for generation in (1, 2, 3, 4):
            run.formed(generation)
            until(lambda: snapshot(run.supervisor)["grouped"] == [0], "one has met")
            run.form_is_over()
        reason = run.outcome().reason
        assert reason == "ranks 1 joined no group in 4 generations"
        assert len(ungrouped.of("fence", rank=1)) == 3 and not grouped.of("fence")


def test_plain_scripts_need_not_say_that_they_group(tmp_path: Path) -> None:
    with a_run(tmp_path, 1, deadlines=Deadlines(form=0.05)) as run:
        (agent,) = run.add(groups=False)
        run.formed(1)
        assert not agent.ended.wait(0.3)
        agent.exit(0, status=0)
        assert run.outcome().status == 0


def test_agreements(tmp_path: Path) -> None:
    with begun(tmp_path, 2, hosts=3) as (_, agents):
        for value in (10, 99):  # the first post counts, the second is the same one again
            agents[0].post("k", 0, value)
        agents[1].post("k", 1, 11, generation=7)  # of no generation of ours
        agents[1].post("k", 1, 11)
        answer = until(lambda: agents[0].of("decided", key="k"), "the agreement")[0]
        assert answer["values"] == {"0": 10, "1": 11} and answer["generation"] == 1
        until(lambda: agents[2].of("decided", key="k"), "agents without a place hear it too")
        agents[0].post("k", 0, 10)
        until(lambda: len(agents[0].of("decided", key="k")) == 2, "the answer again")


def test_what_a_generation_did_not_decide_is_never_decided(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        agents[0].post("commit/5", 0, None)
        agents[0].post("commit/4", 0, "a")
        agents[1].post("commit/4", 1, "b")
        until(lambda: agents[0].of("decided", key="commit/4"), "the agreement")
        assert run.events("agreed")[0]["values"] == {"0": "a", "1": "b"}
        agents[1].exit(1, signal=9)
        run.formed(2)
        agents[1].post("commit/5", 1, None, generation=1)  # of the generation before: refused
        assert agents[1].ask("commit/5") is None and agents[1].ask("commit/4") == {0: "a", 1: "b"}
        assert not agents[0].of("decided", key="commit/5")


def test_stale_and_strange_messages_change_nothing(tmp_path: Path) -> None:
    with begun(tmp_path, 2, hosts=3) as (run, agents):
        agents[1].exit(1, signal=9)
        run.formed(2, agents[:2])
        stale = {"rank": 1, "generation": 1, "pid": 5, "what": "exit", "status": 3, "signal": None}
        agents[1].say("worker", **stale)
        agents[0].say("worker", **{**stale, "generation": 2})  # not its rank
        agents[2].say("worker", **{**stale, "generation": 2})  # it has no place
        agents[1].say("suspect", generation=1, rank=1, error="")
        agents[1].say("done", generation=1, rank=1, result=0)
        agents[0].event("decided", membership={})  # our own words
        agents[0].event("grouped", generation=2, rank=1)
        agents[0].event("note", message="a program's own")
        agents[0].post("x", 0, 0)
        agents[1].post("x", 1, 0)
        until(lambda: agents[1].of("decided", key="x"), "the agreement")
        assert len(run.events("lost")) == 1 and len(run.events("decided")) == 2
        assert not run.events("note")
        assert not run.events("done") and snapshot(run.supervisor)["generation"] == 2


def test_what_killed_a_launcher_does_not_kill_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent calls again what was not answered: whoever was killed by it does not answer."""
    killed: list[int] = []
    monkeypatch.setattr(Supervisor, "kill_launcher", lambda supervisor: killed.append(supervisor.epoch))
    with begun(tmp_path, 1) as (run, (agent,)):
        epoch = run.supervisor.epoch
        agent.say("kill_launcher", epoch=epoch - 1)
        assert not killed
        agent.say("kill_launcher", epoch=epoch)
        assert killed == [epoch]


def test_nonsense_on_the_wire_costs_its_own_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE", 0.5)
    with begun(tmp_path, 1, deadlines=Deadlines(grace=20.0)) as (run, (agent,)):
        for junk in (b"GET / HTTP/1.1\r\n\r\n" * 3, b"\0\0\0\2" + b"\0" * 8 + b"[]", b"\xff" * 40):
            with socket.create_connection(run.supervisor.address.split(":"), timeout=10) as sock:
                sock.sendall(junk)
                assert sock.recv(100) == b""
        with pytest.raises(UserError, match=r"'x', which is not accepted"):
            agent.say("post", generation="x", key="x", values={})
        assert snapshot(run.supervisor)["generation"] == 1


def test_what_ranks_meet_by_is_told_to_all_in_its_generation(tmp_path: Path) -> None:
    with begun(tmp_path, 2, deadlines=Deadlines(grace=20.0)) as (run, agents):

        def values_met(agent: Agent, generation: int) -> dict[str, str]:
            messages = agent.of("met", generation=generation)
            return {key: value for message in messages for key, value in message["said"].items()}

        def said() -> bool:
            agents[0].say("meet", generation=1, said={"a": "1"})  # again where its connection broke
            return [values_met(agent, 1) for agent in agents] == [{"a": "1"}] * 2

        until(said)
        assert agents[1].say("compare_set", generation=1, key="a", expected="0", desired="3") == (False, "1")
        assert agents[1].say("compare_set", generation=1, key="a", expected="1", desired="3") == (True, "3")
        assert agents[1].say("compare_set", generation=0, key="b", expected="", desired="4") is None
        until(lambda: values_met(agents[0], 1) == {"a": "3"})
        agents[1].received.clear()
        agents[1].cut()
        until(lambda: values_met(agents[1], 1) == {"a": "3"}, "what was said before it came back")
        agents[0].met = {"a": "3", "b": "4"}
        run.supervisor.abandon()
        run.outcome()
        agents[1].received.clear()
        run.supervise()
        until(
            lambda: values_met(agents[1], 1) == {"a": "3", "b": "4"}, "what was said to the supervisor before"
        )
        agents[0].met = {}
        agents[0].exit(0, signal=9)
        run.formed(2)
        agents[1].say("meet", generation=1, said={"late": "1"})
        agents[1].say("meet", generation=2, said={"c": "5"})
        until(lambda: values_met(agents[0], 2) == {"c": "5"})
        assert "late" not in values_met(agents[0], 1)


def test_a_host_is_told_of_many_words_at_once(tmp_path: Path) -> None:
    """A round of keys, of each rank one: 16 hosts are told of 128 words in a message each, not in 2,048."""
    with begun(tmp_path, 16, per_host=8) as (run, agents):
        supervisor, words = run.supervisor, {f"here/{rank}": str(rank) for rank in range(128)}
        with supervisor._lock:  # all of it comes while the hosts are still to be told
            for rank, (key, word) in enumerate(words.items()):
                supervisor.hear(
                    agents[rank // 8]._number, {"op": "meet", "generation": 1, "said": {key: word}}
                )
        agents[0].say("meet", generation=1, said=words)  # again, where its connection broke
        agents[0].say("meet", generation=1, said={"last": "1"})
        for agent in agents:
            until(lambda a=agent: any("last" in message["said"] for message in a.of("met")), "the last word")
            assert [message["said"] for message in agent.of("met")] in (
                [words, {"last": "1"}],
                [{**words, "last": "1"}],
            )


def test_a_policy_that_raises_ends_the_run_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(now: object) -> object:
        raise ZeroDivisionError("1/0")

    with begun(tmp_path, 1) as (run, (agent,)):
        monkeypatch.setattr(core, "decide", bad)
        agent.exit(0, signal=9)
        assert run.outcome().reason == "the supervisor failed: ZeroDivisionError: 1/0"
        assert agent.ended.wait(PATIENCE)


def test_a_log_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as (run, (agent,)):
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, run.supervisor._log._file)
        os.close(full)
        agent.post("commit/1", 0, 0)
        outcome = run.outcome()
        assert outcome.status == 1 and "cannot be written" in outcome.reason
        assert agent.ended.wait(PATIENCE) and not agent.of("decided")


def test_stop_ends_everybody(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as (run, (agent,)):
        run.supervisor.stop("interrupted")
        assert run.outcome().reason == "interrupted" and agent.ended.wait(PATIENCE)


def test_a_supervisor_that_was_stopped_gives_nobody_up(tmp_path: Path) -> None:
    """SIGSTOP for several leases, in a process of its own; the agents' silence meanwhile proves nothing."""
    import supervised_process

    with supervised_process.supervised(tmp_path, places=2, lease=0.4) as (process, address):
        agents = [Agent(address), Agent(address)]
        try:
            for agent in agents:
                until(lambda a=agent: a.generation == 1, "generation 1")
            os.kill(process.pid, signal.SIGSTOP)
            threading.Event().wait(1.5)
            os.kill(process.pid, signal.SIGCONT)
            agents[0].post("x", 0, 0)
            agents[1].post("x", 1, 0)
            until(lambda: agents[0].of("decided", key="x"), "the agreement")
            assert agents[0].generation == 1 and not agents[1].ended.is_set()
        finally:
            for agent in agents:
                agent.kill()
