"""Whose fragments a switch adds up, when it has fewer slots than jobs want.

A worker cuts its gradients into *fragments* of one packet, numbered without an end. A *slot* of the switch
adds one fragment of one job over workers; a *server* of the job adds what the switch did not. Three ways to
give slots away:

* **SwitchML** (NSDI 2021): every job has a part of the slots for itself, and no larger window than that.
* **ATP** (NSDI 2021): any job may have any slot; who comes first has it until its sum is whole, and whoever
  meets it there sends past the switch, to the server. ATP holds the slot until the result passes (``hold``).
* **ESA** (arXiv 2201.06398): a fragment of higher priority takes a slot that is not yet whole, and the
  partial sum there leaves for its own server in the packet that came. One that is refused halves the slot's
  priority (ageing), so nobody holds it for ever. A server that waits for the rest of a sum has the switch
  give up what it holds of it (reminder).

*Exactly once.* A sum carries the set of its workers. At the switch and at the server one is added only to a
sum that has none of its workers; what is already there is dropped; a packet that has some of each is passed
by the switch and dropped by the server, for workers send again, alone and past the switch, until they have
the result. Whoever sends fragment s has the result of s - window, so all workers had sent that, and had the
results of s - 2 windows. So a partial sum is of no more use one window behind, a whole one two windows, and a
server that remembers two windows can answer whoever still asks.

Source: the papers' abstracts and the released code of SwitchML and ATP. The text of ESA was not at hand: its
rules are as above, and `priority` is a reconstruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from windtunnel.base.compiled import jit

MOST_WORKERS = 32
"""Of a job: one bit each, as in ATP."""
TAKE, ADD, COMPLETE, DROP, RAW, SWAP, FLUSH, ANSWER = range(8)
ACTIONS = ("take", "add", "complete", "drop", "raw", "swap", "flush", "answer")
"""Of a switch: have the slot for it; add it and keep the sum; add it and pass the whole sum on; forget it;
pass it on as it is; change it for the partial sum in the slot; let the slot's sum go, and it after it. Of a
server: have it in the place of what is there, since it is whole; add, complete, drop, or answer with the
result of long ago."""
STATIC, PREEMPT, PRIORITY, AGEING, HOLD, REMIND = (1 << bit for bit in range(6))
LATER, DOUBLINGS = 3, 2
"""Whole sums of later fragments after which a server does not wait for one; how often patience doubles."""
_PRIMES = (1048583, 1048589, 1048601, 1048609, 1048613, 1048627, 1048633, 1048661)


@dataclass(frozen=True)
class SwitchRules:
    """The parts, each of which may be left out. ``static``: slots in pools, one a job. ``preempt``: a slot
    may be taken from another; by ``priority`` only from a lower one, with ``ageing`` of what is met there.
    ``hold``: a slot is free again only when the result has passed. ``remind``: servers do not only wait."""

    static: bool = False
    preempt: bool = False
    priority: bool = False
    ageing: bool = False
    hold: bool = False
    remind: bool = True

    @property
    def code(self) -> int:
        """As compiled code has them: one bit each, in their order."""
        return sum(getattr(self, field.name) << bit for bit, field in enumerate(fields(self)))


SWITCHML, ATP = SwitchRules(static=True), SwitchRules()
ESA = SwitchRules(preempt=True, priority=True, ageing=True)
RULES = {"switchml": SWITCHML, "atp": ATP, "esa": ESA}


@dataclass(frozen=True)
class FragmentOffer:
    """A fragment at the switch, and the slot that it falls on.

    ``bits``: the workers in it; ``full``: all that the switch waits for; ``resent``: its worker has waited
    too long. ``late``: a window or more behind the job's newest. ``occupied``: the slot is not free;
    ``mine``: by the same fragment; ``behind``: the windows that what holds it lies behind the newest of its
    job; ``whole``: all are in it, and it stays until the server is known to have it; ``there``: the workers
    in it; ``level``: its priority as it is now."""

    rules: SwitchRules
    bits: int
    full: int
    priority: int = 0
    resent: bool = False
    late: bool = False
    occupied: bool = False
    mine: bool = False
    behind: int = 0
    whole: bool = False
    there: int = 0
    level: int = 0


@dataclass(frozen=True)
class SlotDecision:
    """What the switch does (`ACTIONS`), and the workers and the priority of the slot from then on."""

    action: str
    there: int
    level: int


@dataclass(frozen=True)
class PartialSum:
    """A sum at the server: its workers ``bits``, those it has (``have``) and waits for (``full``)."""

    bits: int
    have: int
    full: int


@dataclass(frozen=True)
class SumDecision:
    """What the server does with it (`ACTIONS`), and the workers that it has from then on."""

    action: str
    have: int


@dataclass(frozen=True)
class OverdueFragment:
    """Something that did not come. ``waited``: since it was last asked for; ``patience``: how long one waits
    the first time, in the same unit; ``asked``: how often it was asked for; ``later``: by how many the newest
    that came is later, of which ``enough`` are a sign that it is lost."""

    waited: int
    patience: int
    asked: int
    later: int
    enough: int


@dataclass(frozen=True)
class ResendDecision:
    """Whether to ask for it now: a worker sends its fragment again, a server reminds the switch."""

    now: bool


Observation = FragmentOffer | PartialSum | OverdueFragment
Decision = SlotDecision | SumDecision | ResendDecision


@jit
def place(
    rules: int, bits: int, full: int, priority: int, resent: bool, late: bool, occupied: bool, mine: bool,
    behind: int, whole: bool, there: int, level: int,
) -> tuple[int, int, int]:  # fmt: skip
    """`FragmentOffer` -> (action, workers, priority) of the slot; ``rules`` as `SwitchRules.code`."""
    if resent:
        if occupied and mine:
            return (FLUSH, there, level) if whole else (FLUSH, 0, 0)
        return RAW, there, level
    if late:
        return DROP, there, level
    if not occupied or (behind >= (2 if whole else 1) and not mine):
        return (COMPLETE if bits == full else TAKE), bits, priority
    if mine:
        if bits & there == bits:
            return DROP, there, level
        if bits & there:
            return RAW, there, level
        return (COMPLETE if bits | there == full else ADD), bits | there, max(priority, level)
    if rules & PREEMPT and not whole and (priority > level or not rules & PRIORITY):
        return SWAP, bits, priority
    return RAW, there, level >> 1 if rules & AGEING else level


@jit
def merge(bits: int, have: int, full: int) -> tuple[int, int]:
    """`PartialSum` -> (action, workers that the server has). A sum that is whole answers single workers: they
    ask since its result did not reach them."""
    if have == full:
        return (ANSWER if bits & (bits - 1) == 0 else DROP), have
    if bits == full:
        return TAKE, full
    if bits & have or bits == 0:
        return DROP, have
    return (COMPLETE if bits | have == full else ADD), bits | have


@jit
def is_due(waited: int, patience: int, resends: int, later: int, enough: int) -> bool:
    """`OverdueFragment` -> whether to ask now: each time after twice as long, or at once when later ones
    came."""
    return waited >= patience << min(resends, DOUBLINGS) or (resends == 0 and later >= enough)


@jit
def where(rules: int, job: int, sequence: int, slots: int, share: int) -> int:
    """The slot that a fragment falls on, of ``slots``; ``share``: of a job, where pools are static. Elsewhere
    a job's fragments do not meet each other within ``slots`` of them: an affine hash, another for each job.
    """
    if rules & STATIC:
        return (job * share + sequence % share) % slots
    return (job * 7919 + sequence * _PRIMES[job % 8]) % slots


def priority(layer: int, layers: int, ratio: float, remaining: float) -> int:
    """A fragment's priority, 0 to 255: A RECONSTRUCTION, not the paper's formula, which was not at hand.

    What the abstract and talks name goes into it: front layers (``layer`` 0 of ``layers``) are needed first;
    jobs that communicate for long beside what they compute (``ratio`` of both times) wait most for the
    network; jobs with little left (``remaining`` seconds) free it soonest. The last two on a logarithmic
    scale, 16 steps for a factor of 2; all layers together are worth as much.
    """
    front = 1.0 - layer / max(layers, 1)
    worth = math.log2(max(ratio, 1e-9)) - math.log2(max(remaining, 1e-9))
    return max(0, min(255, round(64 + 16 * worth + 16 * front)))


def decide(observation: Observation) -> Decision:
    """All rules, by the `SwitchRules` that the observation names."""
    match observation:
        case FragmentOffer():
            arguments = [
                getattr(observation, field.name) for field in fields(observation) if field.name != "rules"
            ]
            action, there, level = place(observation.rules.code, *arguments)
            return SlotDecision(ACTIONS[action], there, level)
        case PartialSum():
            action, have = merge(observation.bits, observation.have, observation.full)
            return SumDecision(ACTIONS[action], have)
    return ResendDecision(
        bool(
            is_due(
                observation.waited,
                observation.patience,
                observation.asked,
                observation.later,
                observation.enough,
            )
        )
    )


def _by(rules: SwitchRules) -> Callable[[Observation], Decision]:
    return lambda observation: decide(
        replace(observation, rules=rules) if isinstance(observation, FragmentOffer) else observation
    )


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    **{name: _by(rules) for name, rules in RULES.items()},
    "decide": decide,
}
"""``decide`` goes by the rules in the observation, which may be any combination of parts."""
