"""How to emulate: declared once, for the command line, sweep files, Python, and a run's inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.options import option, options

MIB = 2.0**20
BESIDE = ("jobs", "timeout", "attach")
"""Options that no figure depends on."""
ALONE = ("jobs", "live", "data", "attach")
"""Options of one emulation, not of a sweep."""


@dataclass(frozen=True)
class Options:
    """How to emulate. Where ranks are meant, a number or several do as well as text.

    ``slow``: `Slow`, or as in ``host=3:1.3``. ``steps``: that the first rank runs to find those that repeat
    (None: until they do, and some more are looked at). ``tokens``: of a step of the whole job, where they are
    unknown. ``reserve``: bytes of device memory that no tensor can have: the CUDA context, kernels, and
    NCCL's buffers; by default an estimate. ``confidential``: the scheme of `windtunnel.trust.gpu` that
    protects what leaves a GPU. ``live``: ranks that run for real beside the others (``0,17``, or numbers), to
    which virtual ranks give ``data``; ``attach``: the step before which the first of them stops.

    Raises:
        UserError: one of them is outside of what it may be.
    """

    ranks: str = option(
        "auto", "Ranks to capture: auto, all, or 0,17,120-127.", words="auto, all, or 0,17,120-127"
    )
    slow: Sequence[Any] = option(
        (), "A straggler: host=3:1.3, rank=17:1.5, nic=3:2.", kind=list[str],
        words="a list such as [host=3:1.3]",
    )  # fmt: skip
    jitter: float = option(0.0, "Sigma of random operator times.", least=0.0, most=1.0)
    seed: int = option(0, "Seed of the jitter.", least=0)
    alloc_conf: str = option(
        "", "Allocator settings, as PYTORCH_CUDA_ALLOC_CONF has them.",
        environment=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        words="text as in PYTORCH_CUDA_ALLOC_CONF",
    )  # fmt: skip
    tokens: int | None = option(None, "Tokens or samples of the whole job in a step.", least=0)
    jobs: int = option(2, "Ranks captured at once.", least=1)
    timeout: float = option(
        900.0, "Seconds without progress that count as a hang.", least=1.0,
        words="seconds, a number from 1 up",
    )  # fmt: skip
    steps: int | None = option(None, "Most steps to run in search of a repeating sequence.", least=1)
    reserve: float = option(
        500.0, "Device memory reserved outside of tensors, in MiB.", least=0.0, unit=MIB,
        words="MiB, a number from 0 up",
    )  # fmt: skip
    profile: str | None = option(
        None, "A measured device profile to use, by name.", words="the name of a measured profile"
    )
    aggregation: str = option(
        "none", "Switches that add all_reduces: none, switchml, atp or esa.",
        among=("none", "switchml", "atp", "esa"),
    )  # fmt: skip
    neighbours: int = option(0, "Further jobs that share the switches' slots.", least=0, most=15)
    confidential: str = option(
        "none", "Protection of data that leaves a GPU: none, hix, graviton or h100-cc.",
        words="none, hix, graviton or h100-cc",
    )  # fmt: skip
    live: str | int | Sequence[int] = option("", "Ranks that run for real, in the form of --ranks.", kind=str)
    data: str = option(
        "uniform", "Data from virtual ranks for live ones: uniform (the same data), or zeros.",
        among=("uniform", "zeros"),
    )  # fmt: skip
    attach: int | None = option(None, "Stop the first live rank in pdb before this step.", least=3)

    def __post_init__(self) -> None:
        for name in ("ranks", "live"):
            if not isinstance(given := getattr(self, name), str):
                listed = given if isinstance(given, Sequence) else (given,)
                object.__setattr__(self, name, ",".join(map(str, listed)))
        several = isinstance(self.slow, Sequence) and not isinstance(self.slow, str)
        slow_parts = self.slow if several else () if self.slow is None else (self.slow,)
        object.__setattr__(self, "slow", tuple(str(value) for value in slow_parts))
        for known in options(type(self)):
            value = getattr(self, known.name)
            fits = not known.among or value in known.among
            if known.least is not None and (value is not None or known.default is not None):
                number = isinstance(value, int | float) and not isinstance(value, bool)
                fits = number and known.least <= value <= (known.most or math.inf)
            if not fits:
                raise UserError(f"`{known.name}`: {value!r} is not accepted; accepted is {known.accepted}")

    def deciding(self) -> dict[str, Any]:
        """Those on which the figures depend, as values of JSON: always the usual ones, others where they are
        not as by default."""
        usual = ("ranks", "slow", "jitter", "seed", "alloc_conf", "tokens", "reserve", "steps")
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if field.name not in BESIDE
            and ((value := getattr(self, field.name)) != field.default or field.name in usual)
            and (field.name != "data" or self.live)
        }
