"""When a slot of a shard may be overwritten, and which.

Every shard has `SLOTS` places to lie in, at home and with every holder of a copy. Step s is *committed*
when all copies of all shards of s are complete; word of that comes to each rank later, and to each at its
own time.

The rule: never overwrite a step that is not older than the newest committed step that one knows of. Then
whatever step C is the newest committed one in truth, everybody still holds it: everybody had completed it,
and knows of no later one. So a loss of up to copies - 1 hosts goes back to C or later. A save of s waits
until s-1 is committed. With one slot the only copy is destroyed by writing, which is never safe. A search
through all states of such jobs, beside the tests of this rule, finds the counterexamples to everything
weaker.

After a regrouping that restored step R, R need not have all its copies. Taken for committed at once, it lets
older steps go that have: with groups {0,1} and {2,3} and host 0 just replaced, rank 1 overwrites the last
committed step while R of rank 2 lies with host 2 alone, and the loss of host 2 is then fatal, though
no group is gone. So nothing counts as committed until R's copies are made again, the replacement's own among
them, and R is committed once more; the first save waits for that. A copy left over from an abandoned course
of a step does not count as a copy of it. Steps at or after the one being saved are of an abandoned course
and may go at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from windtunnel.base.units import amount

SLOTS = 2
EMPTY = -1
"""What ``slot_steps`` says of a slot without a complete step: never written, or torn."""

WHY = "a slot is overwritten only when a newer step has all its copies"


def slot_for(step: int, slot_steps: Sequence[int]) -> int:
    """The slot that ``step`` goes to: an abandoned ``step`` or later one, else an empty one, else the oldest.

    ``slot_steps``: the complete step in each slot, `EMPTY` for none.
    """

    def order(slot: int) -> tuple[int, int, int]:
        slot_step = slot_steps[slot]
        # The same step first: were it left, two slots would hold different courses of one step.
        return (0 if slot_step == step else 1 if slot_step > step else 2), slot_step, slot

    return min(range(len(slot_steps)), key=order)


def may_overwrite(step: int, slot_steps: Sequence[int], committed: int) -> bool:
    """Whether ``step`` may be written now to ``slot_for(step, slot_steps)``.

    ``committed``: the newest committed step that the writer knows of, -1 for none. Where the answer is no,
    wait for a later commit and ask again.
    """
    slot_step = slot_steps[slot_for(step, slot_steps)]
    return slot_step == EMPTY or slot_step >= step or slot_step < committed


def needed(own: int, others: int, layouts: int = 0) -> int:
    """Bytes that a host's memory must have free for checkpoints.

    ``own``: bytes of the shards of the host's own ranks. ``others``: of the shards that it holds for others.
    ``layouts``: of what is kept once for each shard (layouts, headers of slots).
    """
    return SLOTS * (own + others) + layouts


def explain(own: int, others: int, layouts: int = 0, free: int | None = None) -> str:
    """The sum of `needed` in words; ``free``: bytes that there are."""
    more = f" + {amount(layouts)} of layouts" if layouts else ""
    text = (
        f"{SLOTS} slots x ({amount(own)} of its own + {amount(others)} held for others){more} = "
        f"{amount(needed(own, others, layouts))}"
    )
    return text if free is None else f"{text}; {amount(free)} are free"
