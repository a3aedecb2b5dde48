"""Whether the checkpoints of a host fit in its memory, and the sum in words."""

from __future__ import annotations

from windtunnel.base.units import amount


def needed(own: int, held: int, slots: int, layouts: int = 0) -> int:
    """Bytes that a host's memory must have free for checkpoints.

    ``own``: bytes of the shards of the host's own ranks. ``held``: of the shards that it holds for others.
    ``layouts``: of what is kept once for each shard (layouts, headers of slots).
    """
    return slots * (own + held) + layouts


def explain(own: int, held: int, slots: int, layouts: int = 0, free: int | None = None) -> str:
    """The sum of `needed` in words; ``free``: bytes that there are."""
    more = f" + {amount(layouts)} of layouts" if layouts else ""
    told = (
        f"{slots} slots x ({amount(own)} of its own + {amount(held)} held for others){more} = "
        f"{amount(needed(own, held, slots, layouts))}"
    )
    return told if free is None else f"{told}; {amount(free)} are free"
