"""Step models: fitted to steps, given as numbers, or measured and kept by ``windtunnel calibrate
serving.engine``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles
from windtunnel.calibration.fit import least_squares
from windtunnel.serving.engine.model import StepTime

NAME, VERSION = "serving-engine", 2
KV = 1 << 20
"""Tokens for which there is room where nothing is known of any memory."""

Point = tuple[int, int, Sequence[tuple[int, int]]]
"""A step: rows, KV tokens that they read, and chunks of prefill, as of `StepTime.of`."""


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """A step model, how far it is from what it was fitted to, and bytes of a token's KV (0: not known)."""

    time: StepTime
    about: str
    token_bytes: int = 0


def save(path: Path, time: StepTime, token_bytes: int, **about: Any) -> None:
    """Keep a measured one; ``about``: further facts as values of JSON, ``model`` and ``error`` among them."""
    profiles.save(path, VERSION, {"step_time": asdict(time), "token_bytes": token_bytes, **about})


def fit(points: Sequence[Point], seconds: Sequence[float], fused: bool = False) -> tuple[StepTime, float]:
    """The step model, and how far the points are from it: the mean of their relative differences.
    ``fused``: rows and chunks are computed together."""
    columns = np.array(
        [
            (
                1.0, n, k, sum(p for p, _ in chunks), sum(p * context for p, context in chunks),
                float(n > 0 and not fused), 0.0 if fused else len(chunks),
            )
            for n, k, chunks in points
        ]
    ).T  # fmt: skip
    model = StepTime(*least_squares(list(columns), np.array(seconds)))
    buffer = np.array([model.of(*point) for point in points])
    return model, float(np.mean(np.abs(buffer / np.array(seconds) - 1)))


def step_time(text: str) -> FittedSteps:
    """Of "calibrated" (this user's own profile), a profile's file, or numbers such as ``base=0.01,row=1e-4``
    (what is left out is 0).

    Raises:
        UserError: it is none of these.
    """
    if "=" in text:
        names = [field.name for field in fields(StepTime)]
        numbers = dict.fromkeys(names, 0.0)
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                numbers[name] += float(value)
            except (KeyError, ValueError):
                raise _wrong(text, f"{part!r} is not one of {', '.join(names)} with a number") from None
            if not 0 <= numbers[name] < 1e9:
                raise _wrong(text, f"{part!r} is not a number of seconds from 0 to 1e9")
        if not numbers["base"] + min(numbers["decode"], numbers["chunk"]) > 0:
            raise _wrong(text, "base, the seconds of any step, must be above 0, or decode and chunk")
        return FittedSteps(StepTime(**numbers), f"by the numbers {text}")
    path = profiles.own(NAME) if text == "calibrated" else Path(text)
    if not path.is_file():
        hint = "; measure one with: windtunnel calibrate serving.engine" if text == "calibrated" else ""
        raise _wrong(text, f"there is no profile {path}{hint}")
    return profiles.read(path, "a profile of an engine's steps", VERSION, _from_content)


def _from_content(content: dict[str, Any]) -> FittedSteps:
    time = StepTime(**{name: float(value) for name, value in content["step_time"].items()})
    about = f"{content['model']}, measured {content['date']} ({content['error']:.0%} off on average)"
    return FittedSteps(time, about, int(content["token_bytes"]))


def _wrong(text: str, why: str) -> UserError:
    return UserError(
        f"serve: `step_time` {text!r}: {why}; accepted are calibrated, a file that 'windtunnel calibrate"
        " serving.engine' wrote, or base=SECONDS and any of row, kv, token, pair, decode, chunk"
    )
