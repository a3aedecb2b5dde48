"""The gap: what stands between a packet and the queue, for each entity, in integers alone.

A virtual queue of the entity's own rate, of which only the length is kept. A packet that would make it longer
than ``limit`` is dropped, one that finds it longer than ``mark`` gets a congestion mark, and the time that it
takes to drain is what a delay-based sender would have waited. So over any time T an entity gets through at
most rate·T + limit bytes, and exactly at its rate while its gap does not come back to 0.

``live/bpf/gap.bpf.c`` has the same arithmetic; both must be changed together (`test_sharing_parity`).

Source: Wu, Wang, Wang, Ng, "Augmented Queue", SIGCOMM 2023 (the A-Gap), in the form of a leaky bucket; fixed
point and clamps are ours.
"""

from __future__ import annotations

from windtunnel.base.compiled import jit
from windtunnel.network.sharing.policy.units import LONGEST, SHIFT

PASS, MARK, DROP = 0, 1, 2


@jit
def step(
    now: int, length: int, last: int, gap: int, rate: int, limit: int, mark: int
) -> tuple[int, int, int]:
    """A packet of ``length`` bytes at ``now`` (ns): the verdict, and the new ``last`` and ``gap``. ``rate``:
    bytes per 2^20 ns, ``limit`` and ``mark``: bytes. A clock that goes back drains nothing, twice neither."""
    passed = now - last
    if passed < 0:
        passed = 0
    else:
        last = now
    if passed > LONGEST:
        passed = LONGEST
    gap -= rate * passed
    if gap < 0:
        gap = 0
    more = gap + (length << SHIFT)
    if more > limit << SHIFT:
        return DROP, last, gap
    return (MARK if more > mark << SHIFT else PASS), last, more


@jit
def virtual_delay(gap: int, rate: int) -> int:
    """ns that a gap takes to drain."""
    return gap // rate
