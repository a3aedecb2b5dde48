"""What to keep of a sandbox, and what to bring back: observations in, decisions out, nothing else.

Six questions. ``CheckpointRequest``: a turn has ended, a checkpoint is requested, or one is under way: what
must it hold? ``Notice``: the host goes away: what is saved of which sandbox, in which order?
``Restore``: what of a checkpoint comes back? ``Shortfall``: something lacks: is that reported, tried again,
or an error? ``Queued``: which job does a free worker take? ``CheckpointHistory``: which checkpoints of a
sandbox are forgotten? ``decide`` answers all; both worlds call it, or the rule of ``queues`` that it calls,
and nothing in them decides beside it. The other
``POLICIES`` are what it is compared with.

Source: Crab (arXiv 2604.28138), sections 3 to 5; the class *shell* and the gate on dirty pages are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Literal

from windtunnel.agents.sandbox.model import LESS, LackKind, PolicyInput, References, TurnClass, TurnEffects
from windtunnel.agents.sandbox.policy.effects import class_of
from windtunnel.agents.sandbox.policy.queues import CheckpointHistory, Forget, Pick, Queued, forgotten, picked

CAPABILITY = "agents.sandbox"
PolicyName = Literal["semantic", "full", "files", "conversation"]
TRIES = 2
"""How often processes that were refused are dumped."""
PAUSE = 0.25
"""Seconds until the next try: a state that CRIU refuses may pass (asynchronous I/O, a debugger's stop)."""


class Occasion(Enum):
    """Why a sandbox is looked at."""

    TURN = "a turn ended"
    REQUESTED = "somebody wants a checkpoint"
    FROZEN = "files alone are about to be kept, and nothing can change any more"
    UNDUMPED = "the processes could not be dumped"
    NOTICE = "the host goes away"


@dataclass(frozen=True)
class CheckpointRequest(PolicyInput["CheckpointPlan"]):
    """A sandbox that stands between two checkpoints. What the newest one lacks is told too (``has_…``).

    ``effects``: what happened since the newest checkpoint; None: nobody looked. ``references``: of the newest
    process image. ``full``: a whole checkpoint is asked for; ``named``: one that gets a label or is pinned.
    ``most``: the strongest class that time allows; ``least``: what was decided of it before it was frozen.
    ``has_lacks``: the newest checkpoint lacks something that was there. ``memory`` (bytes) and ``processes``:
    what it holds now, for what a checkpoint would cost.
    """

    occasion: Occasion
    effects: TurnEffects | None = None
    references: References = field(default_factory=References)
    has_parent: bool = True
    has_files: bool = True
    has_image: bool = True
    images_possible: bool = True
    no_images: str = ""
    """Why they are not, in words."""
    full: bool = False
    named: bool = False
    most: TurnClass = TurnClass.FULL
    least: TurnClass = TurnClass.NONE
    has_lacks: bool = False
    memory: int = 0
    processes: int = 0


@dataclass(frozen=True)
class CheckpointPlan:
    """What a checkpoint has to hold so that nothing of the turn is lost, and what it is made of.

    ``turn_class`` with its ``reasons``, strongest first: what the turn left behind. ``content``: NONE: no
    checkpoint; SHELL: only a manifest and the states of shells; FILES: new files; FULL: new files and a new
    process image. ``image``: it names a process image, the new one or the parent's; ``lost``: why not, in
    words. ``again``: look again once nothing can change, because newer files must fit the older image.
    """

    turn_class: TurnClass
    content: TurnClass
    reasons: tuple[str, ...] = ()
    image: bool = True
    lost: str = ""
    again: bool = False


@dataclass(frozen=True)
class Endangered:
    """A sandbox of a host that goes away. ``needs``: the class that would cover it (FULL where that is not
    known); ``files`` and ``full``: seconds of a checkpoint of files, and of a whole one."""

    name: str
    needs: TurnClass
    files: float
    full: float


@dataclass(frozen=True)
class Notice(PolicyInput["SaveOrder"]):
    """The host goes away in ``seconds``; ``workers`` checkpoints can be made at once."""

    seconds: float
    workers: int
    sandboxes: tuple[Endangered, ...]


@dataclass(frozen=True)
class Save:
    """``most``: the strongest class for which there is time (``CheckpointRequest.most``)."""

    name: str
    most: TurnClass


@dataclass(frozen=True)
class SaveOrder:
    """What is saved of each sandbox, the first first."""

    saves: tuple[Save, ...] = ()


@dataclass(frozen=True)
class Restore(PolicyInput["BringBack"]):
    """A checkpoint that is to be brought back. ``own_image``: its process image was taken with it, so that no
    state of a shell is newer. ``image_bytes`` (raw), ``processes``: for what it would cost."""

    has_files: bool
    has_image: bool
    own_image: bool
    images_possible: bool
    image_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True)
class BringBack:
    """``files``: without them nothing can come back. ``shells``: their kept states are replayed.
    ``services``: those of the sandbox are started anew."""

    files: bool
    processes: bool
    shells: bool
    services: bool


@dataclass(frozen=True)
class Shortfall(PolicyInput["Settle"]):
    """A checkpoint or a restore has less than it should. ``required``: the class that would lack nothing;
    ``reached``: the one that it has. ``lacks``: the kinds of what is missing. ``tries``: how often it was
    tried; ``again``: it can be tried once more. ``allow_less``: somebody has allowed it."""

    required: TurnClass
    reached: TurnClass
    lacks: tuple[LackKind, ...]
    tries: int = 1
    again: bool = False
    allow_less: bool = False


@dataclass(frozen=True)
class Settle:
    """deliver: go on with what there is, and tell. retry: try once more, after ``pause`` seconds. hold: it is
    an error; a checkpoint is kept all the same, its turn's reply is not handed over, and what was restored
    does not run."""

    answer: Literal["deliver", "retry", "hold"]
    pause: float = 0.0


Observation = CheckpointRequest | Notice | Restore | Shortfall | Queued | CheckpointHistory
Decision = CheckpointPlan | SaveOrder | BringBack | Settle | Pick | Forget


def decide(observation: Observation) -> Decision:
    """The policy *semantic*: the least that loses nothing."""
    match observation:
        case CheckpointRequest():
            return _plan(observation, *_needed(observation))
        case Notice():
            return _saved(observation)
        case Restore():
            return _restoration(observation)
        case Shortfall():
            return _settled(observation)
        case Queued():
            return picked(observation)
        case CheckpointHistory():
            return forgotten(observation)


def _needed(request: CheckpointRequest) -> tuple[TurnClass, tuple[str, ...]]:
    if request.full:
        return TurnClass.FULL, ("asked for",)
    if not request.has_parent:
        return TurnClass.FULL, ("the first checkpoint",)
    if not request.has_files:
        return TurnClass.FULL, ("the newest checkpoint holds no files",)
    if request.effects is None:
        return TurnClass.FULL, ("in doubt: nobody looked",)
    turn_class, reasons = class_of(request.effects, request.references, has_image=request.has_image)
    if turn_class < TurnClass.FULL and request.images_possible and not request.has_image:
        return TurnClass.FULL, ("the newest checkpoint holds no process image", *reasons)
    return max(turn_class, request.least), reasons


def _plan(request: CheckpointRequest, needed: TurnClass, reasons: tuple[str, ...]) -> CheckpointPlan:
    turn_class, lost = needed, ""
    if request.occasion is Occasion.FROZEN:
        turn_class = max(turn_class, TurnClass.FILES)
    requested = request.occasion in (Occasion.REQUESTED, Occasion.NOTICE)
    if request.named or (request.has_lacks and requested):  # whether it still lacks that is to be told
        turn_class = max(turn_class, TurnClass.SHELL)
    if not request.images_possible and (turn_class >= TurnClass.FILES or not request.has_image):
        turn_class, lost = min(turn_class, TurnClass.FILES), request.no_images
    elif turn_class > request.most:
        # better the files without the processes than neither; the checkpoint before, which has both, stays
        turn_class, lost = TurnClass.FILES, "there was no time for them"
    may_change = request.occasion is not Occasion.FROZEN
    again = turn_class is TurnClass.FILES and not lost and request.has_image and may_change
    return CheckpointPlan(needed, turn_class, reasons, image=not lost, lost=lost, again=again)


def _saved(notice: Notice) -> SaveOrder:
    """Every sandbox is planned as files first; then, cheapest first, those are made full whose extra time
    still fits. Those that are saved whole come after the others, so that a wrong estimate costs memory images
    and no files. Once no time is left nothing is saved."""
    if notice.seconds <= 0:
        return SaveOrder()
    costs = {
        sandbox.name: (sandbox.files, sandbox.full if sandbox.needs is TurnClass.FULL else sandbox.files)
        for sandbox in notice.sandboxes
    }
    order = sorted(costs, key=lambda name: (costs[name][1] - costs[name][0], name))
    plan = dict.fromkeys(order, TurnClass.FILES)

    def planned() -> list[str]:
        return sorted(plan, key=lambda name: (plan[name], costs[name][1], name))

    for name in order:
        plan[name] = TurnClass.FULL
        times = [costs[cost][plan[cost] is TurnClass.FULL] for cost in planned()]
        if span(times, notice.workers) > notice.seconds:
            plan[name] = TurnClass.FILES
            break
    return SaveOrder(tuple(Save(name, plan[name]) for name in planned()))


def span(times: Iterable[float], workers: int) -> float:
    """Seconds until the last of the jobs ends, each given to the worker that is free first."""
    free = [0.0] * workers
    for seconds in times:
        free[free.index(min(free))] += seconds
    return max(free)


def _restoration(restore: Restore) -> BringBack:
    processes = restore.has_image and restore.images_possible
    return BringBack(
        files=restore.has_files,
        processes=processes,
        shells=not (processes and restore.own_image),
        services=not processes,
    )


def _settled(less: Shortfall) -> Settle:
    if less.allow_less or not less.lacks:
        return Settle("deliver")
    if less.again and less.tries < TRIES:
        return Settle("retry", PAUSE)
    return Settle("hold")


def _full(observation: Observation) -> Decision:
    """Everything at every turn."""
    if isinstance(observation, CheckpointRequest) and observation.occasion is not Occasion.NOTICE:
        return _plan(observation, TurnClass.FULL, ("every turn",))
    return decide(observation)


def _files(observation: Observation) -> Decision:
    """Files at every turn, and never a process."""
    match observation:
        case CheckpointRequest():
            never = replace(observation, images_possible=False, no_images="this policy keeps files alone")
            return _plan(never, TurnClass.FILES, ("every turn",))
        case Notice() if observation.seconds > 0:
            names = sorted(sandbox.name for sandbox in observation.sandboxes)
            return SaveOrder(tuple(Save(name, TurnClass.FILES) for name in names))
    return _allowing(observation)


def _allowing(observation: Observation) -> Decision:
    """As `decide`, where less is what was chosen."""
    return decide(replace(observation, **LESS) if isinstance(observation, Shortfall) else observation)


def _conversation(observation: Observation) -> Decision:
    """Nothing but the first state, until the host goes away."""
    if (
        isinstance(observation, CheckpointRequest)
        and observation.has_parent
        and observation.occasion is not Occasion.NOTICE
    ):
        return _plan(observation, TurnClass.NONE, ("nothing is kept",))
    return _allowing(observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = MappingProxyType(
    {"semantic": decide, "full": _full, "files": _files, "conversation": _conversation}
)
READS_EFFECTS = frozenset({"semantic"})
"""The policies that look at what a turn did; for the others nobody needs to."""
