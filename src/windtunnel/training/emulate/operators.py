"""``operators.json`` of a run: a device profile whose times are still to be filled in, for who prices its
steady steps on another device. A row is (name, arguments, outputs, facts); ``count`` is calls in a period."""

import math
from pathlib import Path

from windtunnel.calibration import profiles
from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.twin.costs import work
from windtunnel.training.emulate.twin.costs.profile import VERSION, encode, signature

NAME = "operators.json"


def write_operators(directory: Path, result: EmulationResult) -> None:
    """The file, in the run's folder; bytes and FLOP of one call, shapes as `matmul_shape` and
    `attention_shapes` give them."""
    shapes, rows = {"matmul": work.matmul_shape, "attention": work.attention_shapes}, []
    for cls in result.classes.classes:
        for op, count in cls.slice.calls():
            if (kind := work.kind_of(op)) == "view":
                continue
            shape = shapes[kind](op) if kind in shapes else ()
            calls_of = {"kind": kind, "count": count, "ranks": len(cls.members), "shape": shape}
            each = {"flops": work.executed_flops(op), "bytes": work.moved_bytes(op, kind)}
            rows.append([*encode(op), {**calls_of, **each}])
    profiles.save(
        directory / NAME, VERSION, {"period": result.classes.classes[0].slice.period}, ("operators", rows)
    )


def joules(result: EmulationResult) -> float | None:
    """Of the operators of all ranks in the mean step; None where the device's profile lacks one of them."""
    known = result.profile.joules if result.profile else {}
    total = sum(
        known.get(signature(op), math.nan) * count * len(cls.members)
        for cls in result.classes.classes
        for op, count in cls.slice.calls()
        if work.kind_of(op) != "view"
    )
    return total / result.classes.classes[0].slice.period if known and not math.isnan(total) else None
