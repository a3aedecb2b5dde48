"""A step is what the job calls one, however many calls of however many optimisers it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from capturing import capture, steady_events

from windtunnel.training.emulate.graph import EventKind, Phase, Slice
from windtunnel.training.emulate.program import OptimizerCalls

# What a step has: forward passes of a layer, and calls of optimisers.
STEPS = {
    "plain": (1, 1), "gan": (2, 2),
    "while_backward_runs": (3, 6), "group_by_group": (2, 2), "closure": (2, 1), "lbfgs": (1, 1),
    "without_modules": (1, 1), "buckets": (1, 1),
}  # fmt: skip


def forwards_and_calls(slice_: Slice) -> tuple[int, int]:
    events = steady_events(slice_)
    issued = Counter(
        (slice_.operators[e["ref"]].name, int(e["phase"])) for e in events if e["kind"] == EventKind.OP
    )
    assert not [name for name, phase in issued if "addmm" in name and phase == Phase.OPTIMIZER]
    forwards = sum(n for (name, phase), n in issued.items() if name == "aten.addmm.default")
    return forwards, Counter(events["kind"].tolist())[EventKind.STEP]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_the_job_calls_one(name: str) -> None:
    (slice_,) = capture("steps.py", f"case_{name}", cluster="h100-sxm:1x1")
    assert forwards_and_calls(slice_) == STEPS[name]
    assert slice_.settled and len(slice_.steps) == (3 if name == "lbfgs" else 2)
    assert not slice_.notes or name == "lbfgs"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("once", "the script ended after one step: its set-up is part of what is reported"),
        ("by_hand", "the script ended without an optimiser step: all of it is reported as one step"),
    ],
)
def test_a_script_without_steps_is_told_so(name: str, said: str) -> None:
    (slice_,) = capture("steps.py", f"case_{name}", cluster="h100-sxm:1x1")
    (note,) = slice_.notes
    assert note.text.startswith(said) and len(slice_.steps) == 1


def ends(calls: list[str]) -> Iterator[int]:
    """At which calls steps end; each call is told by the letters of the parameters that it updates."""
    seen: OptimizerCalls[int] = OptimizerCalls()
    for number, letters in enumerate(calls):
        yield from seen.add(frozenset(map(ord, letters)), number)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("a a a", [0, 1, 2]),
        ("a b a b a b", [1, 3, 5]),
        ("ab cd ab cd", [1, 3]),
        ("a b c a b c a", [2, 5]),
        ("a a b a", [0, 1]),
        ("abc bcd abc", [0, 1, 2]),
        ("a", []),
        ("a b", []),
    ],
)
def test_a_step_ends_before_a_parameter_is_updated_again(calls: str, expected: list[int]) -> None:
    assert list(ends(calls.split())) == expected
