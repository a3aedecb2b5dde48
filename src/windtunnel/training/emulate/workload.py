"""How much work a step is: tokens, FLOPs, and the peak that they are held against."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.cluster.model import Device
from windtunnel.training.emulate.graph import EventKind, Operator, Phase, Slice
from windtunnel.training.emulate.policy.classes import Classes
from windtunnel.training.emulate.twin.cost.flops import counted_flops
from windtunnel.training.emulate.twin.cost.kinds import base_name, first_tensor

REPLICATING = ("tp",)
"""Mesh dimensions whose ranks all look the same tokens up."""


@dataclass(frozen=True)
class Work:
    """Of one step of the whole world. ``model_flops`` leaves recomputation out, ``hardware_flops`` has it;
    both count as ``torch.utils.flop_counter`` does. ``dtype``: that most FLOPs are done in."""

    tokens: int
    model_flops: float
    hardware_flops: float
    dtype: str


def measure(classes: Classes, tokens: int | None = None) -> Work:
    """The work of a steady step of all ranks.

    Tokens are the entries looked up in the embedding table that is asked most; zero where a job has none,
    unless ``tokens`` gives the number of a step of the whole job.
    """
    model = hardware = counted = 0.0
    by_dtype: dict[str, float] = defaultdict(float)
    for cls in classes.classes:
        count = len(cls.members)
        rows, phases = _operators(cls.slice)
        flops = np.array([counted_flops(op) for op in cls.slice.operators])
        each = flops[rows]
        hardware += count * float(each.sum())
        model += count * float(each[phases != Phase.RECOMPUTE].sum())
        for row in np.flatnonzero(flops):
            by_dtype[_dtype(cls.slice.operators[row])] += count * float(each[rows == row].sum())
        counted += count * _looked_up(cls.slice, rows, phases) / _copies(cls.slice)
    dtype = max(by_dtype, key=lambda name: by_dtype[name]) if by_dtype else "float32"
    return Work(round(counted) if tokens is None else tokens, model, hardware, dtype)


def utilisation(flops: float, seconds: float, world_size: int, device: Device, dtype: str) -> float:
    """Model (or hardware) FLOPs utilisation: the share of the devices' peak of ``dtype``, as PaLM defines it
    (arXiv:2204.02311, appendix B)."""
    peak = device.peak(dtype) * world_size
    return flops / (seconds * peak) if seconds > 0 and peak > 0 else 0.0


def _operators(slice_: Slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    events = slice_.events[slice(*slice_.steady)]
    ops = events[events["kind"] == EventKind.OP]
    return ops["ref"].astype(np.int64), ops["phase"].astype(np.int64)


def _dtype(op: Operator) -> str:
    tensor = first_tensor(op)
    return tensor.dtype if tensor is not None else "float32"


def _looked_up(slice_: Slice, rows: NDArray[np.int64], phases: NDArray[np.int64]) -> float:
    """Entries of sequences looked up, in the table that is asked most.

    On CUDA a look-up is an ``index_select`` like others, so its gradient is counted. Indices without a
    sequence dimension (bags) are no tokens.
    """
    count = np.bincount(rows[phases != Phase.RECOMPUTE], minlength=len(slice_.operators))
    asked: dict[tuple[str, object], float] = defaultdict(float)
    for row in np.flatnonzero(count):
        op = slice_.operators[row]
        tensors = op.tensors()
        name = base_name(op.name)
        if name not in ("embedding", "embedding_dense_backward") or len(tensors) < 2:
            continue
        indices = tensors[1]
        if len(indices.shape) >= 2:
            # Of the gradient: (gradient, indices, rows of the table, ...); of the look-up: (table, indices).
            table = op.inputs[2] if name == "embedding_dense_backward" else tensors[0].shape
            asked[name, table] += float(count[row]) * indices.numel
    return max(asked.values(), default=0.0)


def _copies(slice_: Slice) -> int:
    return int(np.prod([len(group.ranks) for group in slice_.groups if group.label in REPLICATING] or [1]))
