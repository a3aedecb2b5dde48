"""What the policies decide, as token counts of sequences: with a stand-in for vLLM that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from parity.serving import engine_effects, engine_twin, in_time
from windtunnel.replay import replay
from windtunnel.serving.engine.model import Objective, Parallel, Serial, StepTime
from windtunnel.serving.engine.policies import event_notes
from windtunnel.serving.engine.policy.step import StepLimits
from windtunnel.serving.vllm.controller import (
    GATHER,
    Arrival,
    Controller,
    StepPlan,
    choose_depths,
    common_length,
    group_sequences,
    limit_tokens,
)
from windtunnel.store.eventlog import EventLog, read

BLOCK = 8
TIME = StepTime(2**-7, 2**-12, 0.0, 2**-12, 0.0)


@dataclass
class Server:
    """Computes what it is told: ``computed`` tokens of each sequence, whose prompts' blocks it keeps.
    ``most``: tokens of a sequence in one step; ``seconds``: of a step."""

    limits: StepLimits
    log: EventLog | None = None
    most: int = 1 << 30
    time: StepTime | None = TIME
    seconds: float = 2**-7
    now: float = 1.0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    blocks: set[tuple[int, ...]] = field(default_factory=set)
    history: list[dict[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        log, note = event_notes(self.log, 1, lambda: 0) if self.log else (None, None)
        self.controller = Controller(
            self.limits,
            self.time,
            block=BLOCK,
            cached=lambda name: (self.cached(name), ()),
            log=log,
            note=note,
        )

    def cached(self, name: str) -> int:
        prompt, depth = self.prompts[name], 0
        while depth + BLOCK < len(prompt) and tuple(prompt[: depth + BLOCK]) in self.blocks:
            depth += BLOCK
        return depth

    def arrive(
        self, name: str, prompt: Sequence[int], most: int, *, family: str = "", **promised: float
    ) -> None:
        self.prompts[name], self.lengths[name] = list(prompt), len(prompt) + most - 1
        objective = Objective(**promised)
        self.controller.arrive(Arrival(name, self.prompts[name], most, self.now, objective, family), self.now)

    def step(self) -> StepPlan:
        self.controller.done(self.now)
        plan = self.controller.plan(self.now)
        self.refused += plan.refused
        counts: dict[str, int] = {}
        for name in [name for name in self.prompts if name not in self.refused]:
            start = self.computed.get(name)
            known = self.cached(name) if start is None else start
            left = max(1, len(self.prompts[name]) - known)
            count = limit_tokens(plan, name, known, left) if self.controller.regulates(name) else left
            if count := min(count, self.most):
                counts[name] = count
                self.computed[name] = known + count
                whole = min(self.computed[name], len(self.prompts[name])) // BLOCK * BLOCK
                self.blocks |= {tuple(self.prompts[name][:end]) for end in range(BLOCK, whole + 1, BLOCK)}
        self.controller.scheduled(
            counts, lambda name: self.computed.get(name, 0) if name in self.prompts else None
        )
        self.now += self.seconds
        for name in counts:
            if self.computed[name] >= self.lengths[name]:
                del self.prompts[name]
                self.controller.finish(name)
        self.history.append(counts)
        return plan

    def run(self) -> None:
        for _ in range(1000):
            if not any(name not in self.refused for name in self.prompts):
                return self.controller.done(self.now)
            self.step()
        raise AssertionError(f"{self.prompts} were never done")


def test_sequences_that_share_blocks_are_branches_of_one_request() -> None:
    prompt = list(range(20))
    some = [Arrival(f"{at}_r", [*prompt, 90 + at], 5 + at, 1.0) for at in range(3)]
    request = group_sequences(7, some, BLOCK).request
    assert request.prompt == 2 * BLOCK + 1
    assert request.stages == (Parallel((4, 4, 4), (5, 6, 7)),)
    assert group_sequences(7, some[:1], BLOCK).request.stages == (Serial(5),)
    assert (
        group_sequences(7, [Arrival("a", [1], 2, 0.0), Arrival("b", [2], 2, 0.0)], BLOCK).request.prompt == 1
    )


def test_common_beginnings() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([], [1]) == 0


def test_a_prompt_is_computed_in_chunks_and_rows_follow() -> None:
    server = Server(StepLimits(4, 1000, chunk=16))
    server.arrive("a", range(40), 3)
    server.run()
    assert server.history == [{"a": 16}, {"a": 16}, {"a": 8}, {"a": 1}, {"a": 1}]


def test_branches_share_the_blocks_of_their_parent() -> None:
    server = Server(StepLimits(8, 1000, chunk=64, branching="eager"))
    for at in range(3):
        server.arrive(f"{at}_r", range(20), 4, family="r")
    assert server.step().ends == {}  # more of them may come
    server.now += GATHER
    server.run()
    assert server.history[1] == {"0_r": 16}
    assert server.history[2] == {"0_r": 4, "1_r": 4, "2_r": 4}
    assert server.history[3:] == [{"0_r": 1, "1_r": 1, "2_r": 1}] * 3


def test_off_decodes_one_branch_at_a_time() -> None:
    server = Server(StepLimits(8, 1000, chunk=64, branching="off"))
    for at in range(3):
        server.arrive(f"{at}_r", range(20), 4, family="r")
    server.now += GATHER
    server.run()
    assert [len(counts) for counts in server.history[3:]] == [1] * 9


@pytest.mark.parametrize("most", [1, 3, 5])
def test_less_than_decided_is_computed_later(most: int) -> None:
    server = Server(StepLimits(4, 1000, chunk=16), most=most)
    server.arrive("a", range(20), 3)
    server.arrive("b", range(9), 2)
    server.run()
    assert sum(counts.get("a", 0) for counts in server.history) == 22


def test_late_requests_are_refused() -> None:
    server = Server(StepLimits(4, 1000, chunk=16))
    server.arrive("a", range(64), 4, ttft=1e-6)
    server.arrive("b", range(64), 4, ttft=100.0)
    server.run()
    assert server.refused == ["a"]
    assert "b" in server.history[-1]


def test_a_sequence_that_ends_early_leaves_its_branches_to_go_on() -> None:
    server = Server(StepLimits(8, 1000, chunk=64, branching="eager"))
    for at in range(2):
        server.arrive(f"{at}_r", range(20), 9, family="r")
    server.now += GATHER
    for _ in range(3):
        server.step()
    server.lengths["1_r"] = 0
    server.run()
    assert server.history[-1] == {"0_r": 1}
    assert not server.controller.regulates("0_r")


def test_what_is_given_up_is_forgotten() -> None:
    server = Server(StepLimits(8, 64, chunk=64))
    for name in ("a", "b"):  # the second one waits for memory
        server.arrive(name, range(20), 20)
    server.step()
    for name in ("a", "b"):
        server.controller.leave(name)
        del server.prompts[name]
    assert server.controller.policies.running == server.controller.policies.waiting == 0
    assert not server.controller.regulates("a")


def test_what_can_never_be_admitted_is_left_to_vllm() -> None:
    server = Server(StepLimits(8, 32, chunk=64))
    server.arrive("a", range(20), 200)
    server.step()
    assert not server.controller.regulates("a")
    server.run()


def test_step_times_are_learned() -> None:
    server = Server(StepLimits(4, 1000, chunk=16), time=None)
    server.arrive("a", range(20), 60)
    server.run()
    assert server.controller.policies.time.of(1, 30) == pytest.approx(2**-7, rel=0.2)


def test_step_times_of_a_host_that_was_slow_are_forgotten() -> None:
    server = Server(StepLimits(4, 1000, chunk=16), time=None, seconds=2**-3)
    server.arrive("a", range(20), 60)
    server.run()
    server.seconds = 2**-7
    for name in range(10):
        server.arrive(f"{name}", range(20), 60)
        server.run()
    assert server.controller.policies.time.of(1, 30) == pytest.approx(2**-7, rel=0.2)


def test_a_step_that_stood_still_makes_no_forecast_longer() -> None:
    server = Server(StepLimits(4, 1000, chunk=32), time=None, seconds=8.0)
    server.arrive("slow", range(20), 60)
    server.step()
    server.seconds = 2**-7
    for name in range(4):
        server.arrive(f"{name}", range(100 * name, 100 * name + 20), 20)
        server.step()
    server.run()
    time = server.controller.policies.time
    assert time.of(1, 30) == pytest.approx(2**-7, rel=0.2)
    assert time.of(1, 30, [(20, 20)]) == pytest.approx(2**-7, rel=0.2)


def test_the_log_is_replayed_and_the_twin_decides_the_same(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    server = Server(StepLimits(3, 70, chunk=16, branching="taper"), log)
    for at in range(12):
        server.arrive(f"s{at}", [*range(16), *range(50, 55 + at)], 3 + at, ttft=0.2, tpot=0.02)
        if at % 3 == 0:
            for branch in range(3):
                server.arrive(f"{branch}_p{at}", [*range(16), 70, at], 4, family=f"p{at}", tpot=0.02)
        server.step()
    server.run()
    log.append("drawn")
    log.close()
    events = read(log.path)
    assert [part.same for part in replay(log.path).parts] == [
        part.decisions for part in replay(log.path).parts
    ]
    assert engine_effects(events) == []
    pairs = engine_twin(in_time(events))
    assert pairs and all(live == twin for live, twin in pairs)


def test_states_are_kept_where_prompts_part_and_at_their_last_whole_block() -> None:
    for prompt, depth, shared, depths in (
        (1000, 0, 0, (2,)), (1000, 0, 400, (1, 2)), (1000, 384, 800, (2,)), (768, 0, 0, (1,)),
        (300, 0, 0, ()),
    ):  # fmt: skip
        _, keep = choose_depths("three-lru", 384, prompt, depth, shared)
        assert keep.depths == depths
