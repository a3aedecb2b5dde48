"""The trainer's loop against an agent that the tests play: what it does in each kind of failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_bodies
import torch.distributed as dist
from fake_agent import FakeAgent
from worker_worlds import BOUND, World, membership_of, world

from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.training.elastic import Job, run
from windtunnel.training.elastic.spec import NAMES


class Stage:
    """A world of processes, and an agent."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.ranks: dict[int, int] = {}
        self.agent: FakeAgent

    def membership(self, world: int, generation: int, **changes: Any) -> Any:
        return membership_of(world, generation, **changes)

    def start(self, train: Callable[[Job], Any], world: int, faults: tuple[str, ...] = ()) -> FakeAgent:
        self.agent = FakeAgent(self.folder, self.membership(world, 1), self.rank_of, faults)
        for rank in range(world):
            self.restart(train, rank)
        return self.agent

    def restart(self, train: Callable[[Job], Any], rank: int) -> None:
        self.world.start(rank, run_bodies.trainer, self.agent.path, str(self.folder), train.__name__)

    def rank_of(self, pid: int) -> int:
        """Also of a process that is quicker than the word that it was started."""

        def known() -> list[int]:
            processes = dict(self.world.processes)
            self.ranks.update({process.pid: rank for rank, process in processes.items()})
            return [self.ranks[pid]] if pid in self.ranks else []

        return until(known, f"process {pid}")[0]

    def status(self, rank: int) -> int | None:
        return self.world.processes[rank].wait(BOUND)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with world() as processes:
        built = Stage(processes, tmp_path)
        yield built
        built.agent.close()


def grouped_in(agent: FakeAgent) -> list[int]:
    """The generations in which ranks grouped."""
    messages = [message for _, message in agent.said if message.get("kind") == "grouped"]
    return sorted(message["generation"] for message in messages)


def test_trains_and_reports(stage: Stage) -> None:
    agent = stage.start(run_bodies.sums, 3)
    for rank in range(3):
        result = agent.wait_for("done", rank)[0]["result"]
        assert result["sum"] == 3.0 and result["made"] == 1
        assert result["values"] == {str(r): {"rank": r, "pair": [1, 2]} for r in range(3)}
        assert stage.status(rank) == 0
    assert len(agent.wait_for("event", kind="grouped", count=3)) == 3
    assert agent.wait_for("event", kind="step")[0]["loss"] == 3.0
    assert not [rank for rank, message in agent.said if message.get("kind") == "step" and rank != 0]
    assert agent.wait_for("beat", rank=1)


def test_who_finishes_last_is_waited_for_longer_than_an_operation(stage: Stage) -> None:
    """It evaluates and saves, with all the others at their end."""
    agent = stage.start(run_bodies.sums, 1)
    (last,) = agent.wait_for("post", key="commit/end")
    assert last["within"] == NAMES["finish"].default > 1000 * NAMES["operation"].default


def test_newer_generation_while_blocked(stage: Stage) -> None:
    """Also of another size: what the dead rank leaves open, nobody waits for."""
    agent = stage.start(run_bodies.blocked_once, 3)
    agent.wait_for("event", kind="blocking", count=3)
    agent.form(stage.membership(2, 2), {0: 0, 1: 1, 2: None})
    for rank in range(2):
        result = agent.wait_for("done", rank)[0]["result"]
        assert result["sum"] == 1.0
        assert result["made"] == 1  # kept in the same process over the generations
    assert [stage.status(rank) for rank in range(3)] == [0, 0, 0]  # no place any more: a quiet end
    # Whoever is told last may see its neighbours leave first, and suspect them: of the first generation.
    assert not [m for _, m in agent.said if m["op"] == "failed"]
    assert {m["generation"] for _, m in agent.said if m["op"] == "suspect"} <= {1}


def test_places_may_change(stage: Stage) -> None:
    agent = stage.start(run_bodies.blocked_once, 3)
    agent.wait_for("event", kind="blocking", count=3)
    agent.form(stage.membership(2, 2), {0: 1, 1: None, 2: 0})
    assert agent.wait_for("done", 2)[0]["result"]["sum"] == 1.0
    assert agent.wait_for("event", 2, kind="step")  # it is rank 0 now
    assert agent.wait_for("done", 0)[0]["rank"] == 1


def test_killed_peer_is_suspected_before_anybody_tells(stage: Stage) -> None:
    agent = stage.start(run_bodies.victim_of_one, 3)
    agent.wait_for("event", kind="blocking", count=3)
    stage.world.kill(2)
    for rank in range(2):  # rank 0 waits for rank 1 only, which cut its group to let it out
        assert "gloo" in agent.wait_for("suspect", rank)[0]["error"]
    agent.form(stage.membership(3, 2))
    stage.restart(run_bodies.victim_of_one, 2)
    for rank in range(3):
        assert agent.wait_for("done", rank)[0]["result"]["sum"] == 3.0


def test_program_that_does_not_come_out(stage: Stage) -> None:
    """gloo loses an operation now and then: the process gives way to another, long before any timeout."""
    agent = stage.start(run_bodies.never_out, 3)
    agent.wait_for("event", kind="blocking", count=3)
    agent.form(stage.membership(3, 2))
    assert "did not come out" in agent.wait_for("event", 1, kind="note")[0]["text"]
    assert stage.status(1) == -9
    agent.form(stage.membership(3, 3))
    stage.restart(run_bodies.never_out, 1)
    assert all(agent.wait_for("done", rank) for rank in range(3)) and grouped_in(agent)[-3:] == [3, 3, 3]


def test_program_that_computes_is_waited_for(stage: Stage) -> None:
    agent = stage.start(run_bodies.slow_to_leave, 2)
    agent.wait_for("event", kind="blocking", count=2)
    agent.form(stage.membership(2, 2))
    assert [agent.wait_for("done", rank)[0]["result"]["made"] for rank in range(2)] == [1, 1]


def test_generation_superseded_while_it_forms(stage: Stage) -> None:
    agent = stage.start(run_bodies.blocked_once, 2)
    agent.wait_for("event", kind="blocking", count=2)
    for generation in range(2, 5):  # a third rank that never comes
        agent.form(stage.membership(3, generation))
    agent.form(stage.membership(2, 5))
    for rank in range(2):
        assert agent.wait_for("event", rank, kind="grouped", generation=5)
        assert agent.wait_for("done", rank)


def test_agreement_is_interrupted(stage: Stage) -> None:
    agent = stage.start(run_bodies.in_agreement, 2)
    agent.decides = lambda key: key != "never"
    agent.wait_for("event", kind="blocking", count=2)
    agent.form(stage.membership(2, 2))
    assert agent.wait_for("done", count=2)


def test_agreement_times_out(stage: Stage) -> None:
    agent = stage.start(run_bodies.late, 2)
    agent.decides = lambda key: key != "never"
    assert "'never' within 0.1 s" in agent.wait_for("event", kind="late", count=2)[0]["text"]
    assert agent.wait_for("done", count=2)


def test_regroup_is_not_swallowed(stage: Stage) -> None:
    agent = stage.start(run_bodies.swallows, 2)
    agent.wait_for("event", kind="blocking", count=2)
    agent.form(stage.membership(2, 2))
    assert agent.wait_for("done", count=2)
    assert not [message for _, message in agent.said if message.get("kind") == "swallowed"]


def test_a_program_may_end_itself(stage: Stage) -> None:
    """Well, as one that returns: what is to be done at its exit is done."""
    agent = stage.start(run_bodies.quits, 1)
    assert agent.wait_for("done")[0]["result"] is None
    assert stage.status(0) == 0 and (stage.folder / "left").exists()


def test_a_program_that_refuses_its_words_says_so_by_its_status(stage: Stage) -> None:
    agent = stage.start(run_bodies.refuses, 1)
    assert stage.status(0) == 2
    assert not [said for _, said in agent.said if said["op"] in ("failed", "suspect", "done")]


def test_exception_of_the_program(stage: Stage) -> None:
    agent = stage.start(run_bodies.own_mistake, 2)
    for rank in range(2):
        error = agent.wait_for("failed", rank)[0]["error"]
        assert "KeyError" in error and "own_mistake" in error
        assert stage.status(rank) == 1
    assert not [message for _, message in agent.said if message["op"] == "suspect"]


def test_values_that_are_none_of_json(stage: Stage) -> None:
    agent = stage.start(run_bodies.odd_values, 1)
    texts = [message["text"] for message in agent.wait_for("event", kind="refused", count=4)]
    assert "Tensor" in texts[0] and "accepted: None, bool" in texts[0]
    assert "bytes of JSON; accepted: 16,777,216" in texts[2]
    assert "'nowhere'" in texts[3]
    assert "object" in agent.wait_for("done")[0]["result"]  # in words


def test_durable_keys_outlive_their_generation(stage: Stage) -> None:
    agent = stage.start(run_bodies.commits, 2)
    agent.decides = lambda key: key != "never"
    assert agent.wait_for("event", kind="durable", count=2)[0]["before"] is None
    agent.form(stage.membership(2, 2))
    assert agent.wait_for("done", count=2)[0]["result"] == {"0": 0, "1": 1}


def test_failure_after_the_last_step(stage: Stage) -> None:
    """The agreement on the end had been recorded: those who learn of the loss first are done as well."""
    agent = stage.start(run_bodies.sums, 2)
    agent.decides = lambda key: key != "commit/end"
    agent.wait_for("post", key="commit/end", count=2)
    agent.durable["commit/end"] = {0: None, 1: None}
    agent.form(stage.membership(2, 2))
    assert agent.wait_for("done", count=2) and grouped_in(agent) == [1, 1]


def test_failure_before_the_end_is_agreed(stage: Stage) -> None:
    agent = stage.start(run_bodies.sums, 2)
    agent.decides = lambda key: key != "commit/end"
    agent.wait_for("post", key="commit/end", count=2)
    agent.decides = lambda key: True
    agent.form(stage.membership(2, 2))
    assert agent.wait_for("done", count=2) and grouped_in(agent) == [1, 1, 2, 2]


def test_agent_is_gone(stage: Stage) -> None:
    agent = stage.start(run_bodies.blocked_once, 2)
    agent.wait_for("event", kind="blocking", count=2)
    agent.drop(1)
    assert stage.status(1) == 1
    assert agent.wait_for("suspect", 0)


def test_restart_all_ends_the_process(stage: Stage) -> None:
    agent = stage.start(run_bodies.blocked_once, 2)
    agent.wait_for("event", kind="blocking", count=2)
    agent.form(stage.membership(2, 2, restart_all=True))
    assert [stage.status(rank) for rank in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("kill:rank=1,step=2", -9),
        ("raise:rank=1,point=after_local_write,step=2", 1),
    ],
)
def test_faults_strike_once_in_a_job(stage: Stage, fault: str, status: int) -> None:
    agent = stage.start(run_bodies.steps, 2, (fault,))
    assert stage.status(1) == status
    event = agent.wait_for("event", 1, kind="injected")[0]
    assert event["fault"] == fault and event["place"] == 1
    agent.form(stage.membership(2, 2))
    stage.restart(run_bodies.steps, 1)
    assert [message["result"] for message in agent.wait_for("done", count=2)] == ["all", "all"]
    assert len([message for _, message in agent.said if message.get("kind") == "injected"]) == 1


def test_faults_of_hosts_are_asked_of_the_agent(stage: Stage) -> None:
    agent = stage.start(run_bodies.steps, 1, ("down:host=0,step=1", "slow:host=0,step=2,rate=8Mbit"))
    agent.wait_for("done")
    down, slow = agent.wait_for("inject", count=2)
    assert down["action"] == "down"
    assert (slow["action"], slow["rate"]) == ("slow", 1e6)


def test_without_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINDTUNNEL_AGENT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def train(job: Job) -> Any:
        assert not job.supervised and job.memory is None and job.world == 1
        job.check()
        job.step(1, loss=1.0)
        job.event("x")
        assert job.decided("commit/1") is None
        assert job.agree("commit/1", (1,)) == {0: [1]}
        return job.decided("commit/1")

    assert run(train) == {0: [1]}
    assert not dist.is_initialized()


def test_a_script_that_ends_its_group_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it did before `run` made the group, and in the environment of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WINDTUNNEL_AGENT", raising=False)

    def train(job: Job) -> str:
        dist.barrier()
        dist.destroy_process_group()
        return "ended"

    assert run(train) == "ended"


def test_a_group_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="a process group exists"):
        run(lambda job: None)
