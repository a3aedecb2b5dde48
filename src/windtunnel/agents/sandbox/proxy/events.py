"""What the model proxy is told to do, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from windtunnel.agents.sandbox.model import Lack
from windtunnel.agents.sandbox.proxy.classify import Kind
from windtunnel.agents.sandbox.proxy.target import checked_base
from windtunnel.base.errors import UserError


class Covering(Protocol):
    """What a checkpoint has come to: a turn's line of the log, or a manifest."""

    @property
    def lacks(self) -> tuple[Lack, ...]: ...


class Checkpointing(Protocol):
    """A turn's checkpoint under way."""

    @property
    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Covering: ...

    def promote(self) -> None: ...


class Turning(Protocol):
    """What the model proxy needs of a sandbox."""

    @property
    def name(self) -> str: ...

    @property
    def turns(self) -> int: ...

    def end_turn(self, request: str = "") -> Checkpointing: ...

    def checkpoint(self) -> Covering: ...

    def passes(self) -> bool:
        """Whether the policy lets a turn's reply out though nothing of the turn may be kept."""


@dataclass(frozen=True)
class Bounds:
    """What one model proxy takes on, in bytes, requests and seconds.

    ``gate``: how long a reply is held for its checkpoint. ``connect`` and ``silence``: how long the model
    service may take to be reached, and to send nothing in the middle. ``sending``: how long a client may take
    to send a body.
    """

    body: int = 64 * 2**20
    reply: int = 64 * 2**20
    open_total: int = 512
    open_box: int = 32
    gate: float = 120.0
    connect: float = 15.0
    silence: float = 600.0
    sending: float = 120.0
    ending: float = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise UserError(f"model proxy: bound {name} is {value}; it must be more than 0")


@dataclass(frozen=True)
class Upstream:
    """A service that is forwarded to. ``headers`` are set on each request, over the agent's own;
    ``key_file`` is the file of this host that holds the API key. Neither is ever seen inside the sandbox."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    key_file: Path | None = None

    def __post_init__(self) -> None:
        checked_base(self.url)


@dataclass(frozen=True)
class Classified:
    """A request has arrived."""

    box: str
    request: str
    kind: Kind
    reason: str


@dataclass(frozen=True)
class TurnServed:
    """A reply of the main loop may go out. ``think``: seconds until the reply began to arrive. ``gate``:
    seconds that it was then held for the checkpoint. ``promoted``: the checkpoint was made urgent. ``fault``:
    what its checkpoint lacks, which somebody has allowed; empty when it is whole."""

    box: str
    request: str
    turn: int
    think: float
    gate: float
    promoted: bool
    fault: str = ""


@dataclass(frozen=True)
class Replayed:
    """A request was answered without asking the model. ``attached``: by a reply that was still under way."""

    box: str
    request: str
    turn: int
    attached: bool = False


@dataclass(frozen=True)
class Failed:
    """Something went wrong, in words."""

    box: str
    request: str
    what: str


ProxyEvent = Classified | TurnServed | Replayed | Failed
