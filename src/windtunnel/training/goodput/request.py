"""What a plan is asked for: declared once, for the command line and for Python."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.base.options import option
from windtunnel.base.units import parse_quantity


def _read(unit: str, written: str | float | None) -> float | None:
    return None if written is None else parse_quantity(written, unit)


def _in(unit: str) -> Callable[..., Any]:
    """Makes options that are written with their unit; the field holds so many ``unit``."""
    metavar = {"bytes": "BYTES", "seconds": "TIME", "bytes/s": "RATE"}[unit]
    return partial(option, kind=str | None, metavar=metavar, read=partial(_read, unit))


_seconds, _bytes, _rate = map(_in, ("seconds", "bytes", "bytes/s"))


@dataclass(frozen=True, kw_only=True)
class ResilienceRequest:
    """The options of ``windtunnel plan resilience``, in SI units. One of ``mtbf`` and ``trace`` is needed."""

    cluster: str = option(help="A name of the catalogue such as h100-sxm:128x8, or a file.")
    state_bytes: float = _bytes(help="Parameters and optimizer state of the job: 1.1e12, '1.1 TB'.")
    mtbf: float | None = _seconds(None, "Mean time between failures of the job: 3h, 600.")
    trace: str | None = option(
        None,
        "Instead of --mtbf: llama3, spot:p3, spot:g4dn (with their published statistics), or a file"
        " of lines 'milliseconds,add|remove,host' or of SkyPilot (.json).",
        metavar="NAME|FILE",
    )
    step_time: float = _seconds("10s", "Seconds of a step without failures.")
    days: float = option(30.0, "Length of the forecast, in days.", least=0.01, most=3650)
    software: float = option(0.13, "Share of failures that leave the host alive.", least=0, most=1)
    leaf_share: float = option(0.0, "Share of host failures that take a whole leaf switch.", least=0, most=1)
    replace: float = _seconds("10min", "Seconds until a lost host is replaced.")
    spares: int | None = option(None, "Idle spare hosts. Default: none, compared with one.", least=0)
    storage: float = _rate("20 GB/s", "Bandwidth of the shared storage for all hosts.")
    storage_share: float = option(1.0, "Share of that bandwidth for checkpoints.", least=0.001, most=1)
    storage_within: float = _seconds("1d", "Longest interval of checkpoints to storage.")
    save_stall: float | None = _seconds(
        None, "Seconds of training lost to a checkpoint in storage. Default: the copy within a host."
    )
    host_memory: float = _bytes("1 TB", "Memory of each host for checkpoints.")
    stages: int = option(0, "Hosts of a pipeline; 0: the fewest that hold the state twice.", least=0)
    costs: Path | None = option(  # noqa: RUF009 - a field
        None, 'Measured costs: JSON such as {"detect": 0.03}, in seconds and bytes/s.', metavar="FILE"
    )
    seed: int = option(0, "Seed of the failures.", least=0)
    script: str = option("train.py", "Script in the printed command.")
    persist: str = option("checkpoints", "Storage (--persist) in the printed command.", metavar="URL")
