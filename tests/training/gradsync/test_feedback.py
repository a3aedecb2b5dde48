"""Error feedback: what was sent and what waits is what backward made, whatever happens in between."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.codecs import find, seed_of
from windtunnel.training.gradsync.live.feedback import Feedback, Residuals, redistributed

LAYOUTS: tuple[list[dict[str, int]], ...] = (
    [{"a": 700, "b": 33}, {"c": 1}],
    [{"a": 700}, {"b": 33, "c": 1}],
    [{"c": 1, "b": 33, "a": 700}],
)
SPECS = ("none", "fp16", "bf16", "int8", "sign", "dragonn:0.02")
SIZES = {"a": 700, "b": 33, "c": 1}


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def norm(feedback: Feedback) -> float:
    """Of all that waits."""
    waits = feedback.state_dict().values()
    return math.sqrt(sum(float(residual.square().sum()) for residual in waits))


class Rank:
    """One that sends gradients, and knows what it made and sent by parameter."""

    def __init__(self, layout: list[dict[str, int]]) -> None:
        self.produced = {name: torch.zeros(numel) for name, numel in SIZES.items()}
        self.sent = {name: torch.zeros(numel) for name, numel in SIZES.items()}
        self.arrange(layout)

    def arrange(self, layout: list[dict[str, int]], state: Residuals | None = None) -> None:
        """Begins anew with other groups, and the state that there was."""
        self.layout, self.feedback = layout, Feedback(layout)
        if state is not None:
            self.feedback.load_state_dict(state)

    def step(self, spec: str, gradients: dict[str, Tensor], step: int = 0) -> None:
        codec = find(spec)
        for place, group in enumerate(self.layout):
            row = torch.cat([gradients[name] for name in group])
            seed, out = seed_of(1, step, place), torch.zeros(len(row))
            codec.add(self.feedback.encode(place, row, codec, seed), out)
            for name, part in zip(group, out.split(list(group.values())), strict=True):
                self.sent[name] += part
                self.produced[name] += gradients[name]

    def waits(self) -> dict[str, Tensor]:
        residuals = self.feedback.state_dict()
        return {name: residuals.get(name, torch.zeros(numel)) for name, numel in SIZES.items()}


def gradients_of(seed: int) -> dict[str, Tensor]:
    return {name: noise(numel, 97 * seed + place) for place, (name, numel) in enumerate(SIZES.items())}


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(SPECS), st.sampled_from(("step", "accumulate", "arrange"))),
        min_size=1, max_size=12,
    ),
    seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_was_sent_and_what_waits_is_what_was_made(steps: list[tuple[str, str]], seed: int) -> None:
    """Every codec, after every other, through accumulation, other groups, and saving."""
    rank = Rank(LAYOUTS[0])
    lossy = False
    for number, (spec, event) in enumerate(steps):
        gradients = gradients_of(seed + number)
        if event == "accumulate":
            more = gradients_of(seed + number + 500)
            gradients = {name: gradients[name] + more[name] for name in gradients}
        elif event == "arrange":
            rank.arrange(LAYOUTS[number % 3], rank.feedback.state_dict())
        rank.step(spec, gradients, number)
        lossy |= not (find(spec).feedback or find(spec).lossless)
        if find(spec).lossless:
            assert norm(rank.feedback) == 0
        # codecs that are true in the mean send what they have, with its error, and nothing waits
        if not lossy:
            for name, waits in rank.waits().items():
                scale = 1 + float(rank.produced[name].abs().max()) + float(rank.sent[name].abs().max())
                assert torch.allclose(rank.sent[name] + waits, rank.produced[name], atol=2e-5 * scale), spec


@pytest.mark.parametrize("spec", ["int8", "sign", "dragonn:0.02"])
def test_nothing_waits_for_ever(spec: str) -> None:
    """One gradient, then none: what it left is sent in the end, or is a small share."""
    codec = find(spec)
    rank = Rank(LAYOUTS[0])
    rank.step(spec, gradients_of(3))
    begun = norm(rank.feedback)
    for step in range(1, 150):
        rank.step(spec, {name: torch.zeros(numel) for name, numel in SIZES.items()}, step)
    assert norm(rank.feedback) <= 0.12 * begun
    assert codec.feedback == (begun > 0)


@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_that_is_no_number_is_seen_and_changes_nothing(spec: str) -> None:
    rank = Rank(LAYOUTS[0])
    rank.step(spec, gradients_of(1))
    before = rank.feedback.state_dict()
    spoilt = gradients_of(2)
    spoilt["a"][5], spoilt["c"][0] = math.nan, math.inf
    rank.step(spec, spoilt, 1)
    assert not rank.sent["a"].isfinite().all() and not rank.sent["c"].isfinite().all()
    after = rank.feedback.state_dict()
    assert all(torch.equal(residual, after[name]) for name, residual in before.items())


@pytest.mark.parametrize(("former", "world"), [(4, 2), (4, 3), (2, 5), (3, 3), (5, 1)])
def test_what_waits_survives_another_number_of_ranks(former: int, world: int) -> None:
    ranks = [Rank(LAYOUTS[0]) for _ in range(former)]
    for number, rank in enumerate(ranks):
        rank.step("dragonn:0.02", gradients_of(number))
    states = [rank.feedback.state_dict() for rank in ranks]
    others = [Rank(LAYOUTS[1]) for _ in range(world)]
    for number, rank in enumerate(others):
        rank.arrange(LAYOUTS[1], redistributed(states, number, world))
    for name in SIZES:
        before = sum(state[name] for state in states)
        residuals = [rank.feedback.state_dict().get(name) for rank in others]
        after = sum(residual for residual in residuals if residual is not None)
        assert torch.allclose(before, after, atol=1e-6)  # type: ignore[arg-type]
        assert name != "a" or before.any()
    # ranks that stay keep their own
    if world >= former:
        for number, state in enumerate(states):
            kept = others[number].feedback.state_dict()
            assert all(torch.equal(kept[name], state[name]) for name in SIZES)


def test_a_state_of_another_model_is_refused() -> None:
    rank = Rank(LAYOUTS[0])
    rank.step("sign", gradients_of(0))
    state = rank.feedback.state_dict()
    with pytest.raises(UserError, match=r"'b', none are in the groups"):
        Feedback([{"a": 700, "c": 1}]).load_state_dict(state)
    with pytest.raises(UserError, match=r"700 elements of 'a', 701 are in the groups"):
        Feedback([{"a": 701, "b": 33, "c": 1}]).load_state_dict(state)
