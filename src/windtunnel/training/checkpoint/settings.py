"""What a `PeerCheckpointer` may be told, by argument or in the environment variable WINDTUNNEL_CHECKPOINT.

The variable holds a JSON object, as the launcher writes it; arguments of the program go before it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.checkpoint.policy.placement import Kind

Mode = Literal["blocking", "concurrent", "idle"]
VARIABLE = "WINDTUNNEL_CHECKPOINT"
_LEAST = {"copies": 1, "persist_every": 1, "keep": 0, "every": 1, "profile": 1}


@dataclass(frozen=True)
class CheckpointSettings:
    """``copies``: of every shard, the one at home counted. ``placement``: where the others go ("mixed" is
    "group" where the copies divide the places); with ``domains`` (a name for each place) no two of them into
    one. ``mode``: when they are sent. ``persist``: URL of storage, written every ``persist_every`` steps, of
    which the newest ``keep`` stay (0: all).
    ``on_no_checkpoint``: what becomes of a job whose committed steps are all lost: "fail", or "restart" from
    the beginning. ``every``: steps between checkpoints. ``patience``: seconds that a save waits for the one
    before to be committed, before it is left out. ``stored``: seconds that the end of a job waits for what is
    being written to storage, ``load``: that a restore waits for the ranks that load longest. ``rng``: save
    and restore the global generators.
    For idle mode, ``profile``: steps to observe first, ``bandwidth`` (bytes/s, measured where it is None),
    ``startup`` (s a chunk), ``buffer`` (bytes) in ``parts`` parts, ``safety``: the share of an idle span that
    is used.
    """

    copies: int = 2
    placement: Kind = "mixed"
    domains: tuple[str, ...] | None = None
    mode: Mode = "concurrent"
    persist: str | None = None
    persist_every: int = 100
    keep: int = 0
    on_no_checkpoint: Literal["fail", "restart"] = "fail"
    every: int = 1
    patience: float = 60.0
    stored: float = 60.0
    load: float = 1800.0
    rng: bool = True
    profile: int = 5
    bandwidth: float | None = None
    startup: float = 0.001
    buffer: int = 32 << 20
    parts: int = 4
    safety: float = 0.8


@dataclass(frozen=True)
class MemoryLimits:
    """Of the memory service, seconds. ``connect``: until a peer's listener answers. ``silence``: without a
    byte, before a connection counts as dead. ``membership``: how long a request of a newer generation waits
    for word of it here. ``slot``: how long a PUT waits at the holder for its slot. ``pause``: longest one
    between two attempts."""

    connect: float = 2.0
    silence: float = 20.0
    membership: float = 10.0
    slot: float = 2.0
    pause: float = 0.5


def settings(options: dict[str, Any]) -> CheckpointSettings:
    """The defaults, what the environment says, and then ``options`` (None: not given).

    Raises:
        UserError: a field or a value that is not accepted, with where it came from.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        values = json.loads(text) if text else {}
    except ValueError as error:
        raise UserError(f"{VARIABLE}: {text!r} is not JSON; an object is accepted") from error
    if not isinstance(values, dict):
        raise UserError(f"{VARIABLE}: {text!r} is not an object of JSON")
    chosen = _checked(VARIABLE, CheckpointSettings(), values)
    return _checked("PeerCheckpointer", chosen, {k: v for k, v in options.items() if v is not None})


def _checked(origin: str, base: CheckpointSettings, values: dict[str, Any]) -> CheckpointSettings:
    try:
        chosen = from_plain(CheckpointSettings, to_plain(base) | to_plain(values))
    except (TypeError, ValueError) as error:
        raise UserError(f"{origin}: {error}") from error
    for name, value in vars(chosen).items():
        if value < _LEAST[name] if name in _LEAST else isinstance(value, float) and not value > 0:
            least = f"{_LEAST[name]} or more" if name in _LEAST else "a number above 0"
            raise UserError(f"{origin}: {name} is {value:g}; {least} is accepted")
    return chosen
