"""All interleavings of saves, replication, commits and losses: the shipped rule of slots is safe in every
state, anything weaker is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from conformance.training.slot_search import Choose, Rule, lead, search
from windtunnel.training.checkpoint.policy.slots import SLOTS, may_overwrite, slot_for


def always(step: int, held: Sequence[int], committed: int) -> bool:
    """Weaker: a rank waits for nobody."""
    return True


def one_behind(step: int, held: Sequence[int], committed: int) -> bool:
    """Weaker: content with the commit of the step that is overwritten."""
    return committed >= step - 2


def as_old(step: int, held: Sequence[int], committed: int) -> bool:
    """Weaker by one: the newest committed step itself may go."""
    kept = held[slot_for(step, held)]
    return kept < 0 or kept >= step or kept <= committed


def the_first(step: int, held: Sequence[int]) -> int:
    """Ignores what is held."""
    return 0


def the_newest(step: int, held: Sequence[int]) -> int:
    """Keeps the wrong one."""
    return max(range(len(held)), key=lambda slot: held[slot])


@pytest.mark.parametrize(
    ("ranks", "copies", "steps", "failures"),
    [(2, 2, 4, 0), (3, 2, 3, 0), (3, 3, 2, 0), (2, 2, 3, 1), (2, 2, 2, 2)],
)
def test_the_shipped_rule_is_safe(ranks: int, copies: int, steps: int, failures: int) -> None:
    counterexample = search(SLOTS, ranks, may_overwrite, steps, copies=copies, failures=failures)
    assert counterexample is None, counterexample


@pytest.mark.parametrize("rule", [always, one_behind, as_old])
def test_a_weaker_rule_is_found_out(rule: Rule) -> None:
    counterexample = search(SLOTS, 2, rule)
    assert counterexample is not None
    assert "begins to save" in counterexample.trace[-1]
    assert "can be restored" in counterexample.why


def _saved(step: int, replicated: Sequence[int]) -> Iterator[str]:
    for rank in range(4):
        yield f"rank {rank} begins to save step {step}"
        yield f"rank {rank} has saved step {step}"
    for rank in replicated:
        yield f"step {step} of rank {rank} is on its way"
        yield f"step {step} of rank {rank} is replicated"


IN_DOUBT = [*_saved(0, range(4)), *_saved(1, (0, 1, 3)), "host 0 dies and is replaced"]
"""Step 1 is complete, but rank 2's lies on host 2 alone; a host of the other group is lost."""


def test_a_second_loss_after_a_restore_of_a_step_that_was_not_committed() -> None:
    begin = lead(SLOTS, 4, IN_DOUBT)
    assert search(SLOTS, 4, steps=1, failures=1, start=begin) is None


def test_who_saves_before_the_restored_step_is_committed_again_is_found_out() -> None:
    begin = lead(SLOTS, 4, IN_DOUBT, wait=False)
    counterexample = search(SLOTS, 4, steps=1, failures=1, wait=False, start=begin)
    assert counterexample is not None
    assert "step 0 was committed; without host 2, nothing can be restored" in counterexample.why


@pytest.mark.parametrize("choose", [the_first, the_newest])
def test_a_wrong_choice_of_slot_is_found_out(choose: Choose) -> None:
    assert search(SLOTS, 2, choose=choose) is not None


def test_a_rule_that_forbids_too_much_is_found_out() -> None:
    def never(step: int, held: Sequence[int], committed: int) -> bool:
        return -1 in held

    counterexample = search(SLOTS, 2, never, steps=3)
    assert counterexample is not None
    assert counterexample.dead == -1


def test_one_slot_is_never_safe() -> None:
    counterexample = search(1, 2, always, choose=the_first)
    assert counterexample is not None
    assert "nothing can be restored" in counterexample.why
