"""Where copies lie, when they go there, in the idle spans of training's network, and over how many steps one
is spread (GEMINI, section 5).

The trainer opens a *window* where the network falls quiet at a place of the step at which it usually does,
for the safe part of the usual span, and closes it as soon as there is traffic. A pause in the middle of a
collective is at no such place. When the network stays quiet for much longer than any span, a window is open
until it no longer is: then training waits, perhaps for this very checkpoint.

The agent sends within a window, in chunks that end before it does: a chunk of s bytes takes
``startup + s / bandwidth``. Nor does a chunk take longer than `LONGEST`: a window that closes before its time
is not heard of in the middle of one. After each chunk the link is taken to be busy for that long (a token
bucket of one chunk). Other modes send at once, slowed down only by a ``bandwidth`` where one is given.

A training step uses the network the same way each time: between its collectives lie *idle spans* of known
length, of which the ``safety`` share is used. A chunk is at most one part of the receiver's staging buffer,
so that the next one is received while one is copied away. The slowest rank's number of steps holds for all: a
step that only some of them save is never committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.placement import Kind, place

SMALLEST = 16 << 10
"""No chunk is cut below this, unless it is the last: its fixed cost would be most of it."""
ENDLESS = 600.0
"""A window of so many seconds is no idle span, but leave to send the rest."""
LONGEST = 0.02
"""Seconds."""
OPEN = 3600.0
"""A window without an end."""
_QUIET = 2  # looks without traffic that make an idle span
_STALLED = 1.5  # times the longest span: no idle span of training any more
_FIRST_GUESS = 50e6


@dataclass(frozen=True)
class Sending:
    """``left`` bytes of a copy are still to be sent; the largest chunk has ``chunk``, and each costs
    ``startup`` seconds beside. ``bandwidth``: bytes/s, None: not known yet. ``room``: seconds for which a
    window is open still (0 or less: none is; None: for as long as it takes). ``busy``: seconds that the link
    is taken for."""

    mode: str
    left: int
    chunk: int
    bandwidth: float | None
    startup: float
    room: float | None
    busy: float


@dataclass(frozen=True)
class Allowance:
    """``nbytes`` may be sent now; if none, ask again after ``pause`` seconds (None: when a window opens)."""

    nbytes: int
    pause: float | None = 0.0


@dataclass(frozen=True)
class NetworkSample:
    """A look at the network: there was traffic (``busy``), or none for ``idle`` seconds, and in the last
    ``looks`` looks. ``here``: seconds of the span that is usual at this place of the step, None for none;
    ``longest``: of all; ``always``: none has room for a chunk. ``window_open``: a window is, ``endless``: for
    as long as it takes. ``safety``: the share of a span that is used."""

    busy: bool
    looks: int
    idle: float
    here: float | None
    longest: float
    always: bool
    window_open: bool
    endless: bool
    safety: float
    startup: float


@dataclass(frozen=True)
class Window:
    """What is done with the window; ``seconds``: how long it is open, ``endless``: as long as it takes."""

    act: Literal["keep", "open", "close"]
    seconds: float = 0.0
    endless: bool = False


@dataclass(frozen=True)
class CopiesWanted:
    """``copies`` of each shard among ``places`` hosts; fields as in `placement.place`. ``own``: the domains
    that the hosts say of themselves."""

    places: int
    copies: int
    kind: Kind
    domains: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def allowance(now: Sending) -> Allowance:
    """How many bytes may be sent."""
    if now.busy > 0:
        return Allowance(0, now.busy)
    most = min(now.left, now.chunk)
    if now.mode != "idle":
        return Allowance(most)
    bandwidth = now.bandwidth or _FIRST_GUESS
    most = min(most, max(SMALLEST, int(LONGEST * bandwidth)))
    if now.room is None or now.room > ENDLESS:
        return Allowance(most)
    size = min(most, int((now.room - now.startup) * bandwidth))
    return Allowance(size) if size >= min(now.left, SMALLEST) else Allowance(0, None)


def window(now: NetworkSample) -> Window:
    """Whether a window opens or closes. Where no span has room, copies are sent beside training's traffic."""
    if now.always:
        return Window("keep") if now.endless else Window("open", OPEN, endless=True)
    if now.busy:
        return Window("close" if now.window_open else "keep")
    if now.looks < _QUIET:
        return Window("keep")
    if not now.endless and now.idle > _STALLED * now.longest:
        return Window("open", OPEN, endless=True)
    left = now.safety * (now.here or 0.0) - now.idle
    if not now.window_open and left > now.startup:
        return Window("open", left)
    return Window("keep")


def holders(now: CopiesWanted) -> Placement:
    """Who holds whose copies. A job that has shrunk goes on with what is possible."""
    copies = min(now.copies, now.places)
    kind = "mixed" if now.kind == "group" and now.places % copies else now.kind
    domains = now.domains if len(now.domains) == now.places else now.own
    return place(now.places, copies, kind, domains)


@dataclass(frozen=True)
class NetworkProfile:
    """What a rank knows of its network: the idle ``spans`` of a step (s), the bytes of one copy of its shard,
    and the bandwidth (bytes/s; None: not known yet)."""

    spans: tuple[float, ...]
    nbytes: int
    bandwidth: float | None


@dataclass(frozen=True)
class Profiles:
    """Of all ``ranks``. ``copies``: of each shard, with the one at home, which needs no network. ``buffer``:
    bytes of staging memory, in ``parts`` parts. ``startup``: seconds a chunk. ``safety``: the share of a span
    that is used, in (0, 1]."""

    ranks: tuple[NetworkProfile, ...]
    copies: int
    buffer: int
    parts: int
    startup: float
    safety: float


@dataclass(frozen=True)
class Spread:
    """A checkpoint is made ``every`` so many steps. ``always``: some rank has no span with room for anything,
    so copies are sent beside training's traffic."""

    every: int
    always: bool = False


def spread(now: Profiles) -> Spread:
    """The fewest steps in whose spans all copies of each rank go."""
    steps = [_steps(now, rank) for rank in now.ranks]
    return Spread(1, always=True) if 0 in steps else Spread(max(steps))


def _steps(now: Profiles, rank: NetworkProfile) -> int:
    """Those of one rank; 0 where no span has room."""
    if rank.bandwidth is None:
        return 1
    part = max(1, min(now.buffer // now.parts, int(LONGEST * rank.bandwidth)))
    whole = now.startup + part / rank.bandwidth
    room = 0
    for span in rank.spans:
        chunks, left = divmod(now.safety * span, whole)
        # what rounding took from a whole byte is given back
        last = int((left - now.startup) * rank.bandwidth * (1 + 1e-9) + 1e-9)
        room += int(chunks) * part + max(0, last)
    nbytes = (now.copies - 1) * rank.nbytes
    return max(1, -(-nbytes // room)) if room else int(not nbytes)
