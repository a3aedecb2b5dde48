"""How much work a step is, and how well the devices are used by it.

MFU is as PaLM defines it (arXiv:2204.02311, appendix B), with each dtype's FLOPs at that dtype's own peak, so
that a job of bf16 and fp8 reaches 1 exactly when every product runs at the peak of its units: FLOP_d over
peak_d, summed over dtypes d, over time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.cluster.model import UNITS, Device
from windtunnel.training.emulate.graph import (
    DTYPE_BYTES,
    EventKind,
    Note,
    NoteKind,
    Operator,
    Phase,
    Slice,
)
from windtunnel.training.emulate.policy.classes import Classes
from windtunnel.training.emulate.twin.costs.work import base_name, counted_flops, executed_flops, units_of

MODEL, HARDWARE, MODEL_RUN, HARDWARE_RUN = range(4)
"""Places in the FLOPs of a dtype: without what is recomputed, and with it, as ``torch.utils.flop_counter``
counts them (causal attention in full); then the same without the masked half, which kernels leave out."""


@dataclass(frozen=True)
class StepWork:
    """Of one step of the whole world. ``flops``: four figures for each dtype, see `MODEL`."""

    tokens: int | None
    flops: dict[str, NDArray[np.float64]]

    def total(self, figure: int) -> float:
        """FLOP of all dtypes."""
        return float(sum(flops[figure] for flops in self.flops.values()))

    @property
    def dtype(self) -> str:
        """That most FLOPs are done in; both formats of float8 are done by the same units."""
        by_unit: dict[str, float] = defaultdict(float)
        for name, flops in self.flops.items():
            by_unit[UNITS.get(name, (name,))[0]] += flops[HARDWARE]
        return max(by_unit, key=lambda name: by_unit[name], default="float32")


def measure(classes: Classes, tokens: int | None = None) -> StepWork:
    """The work of a steady step of all ranks, of the mean one where several make a period.

    Tokens are the entries looked up in the embedding table that is asked most; None where a job has none,
    unless ``tokens`` gives the number of a step of the whole job.
    """
    flops: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
    lookups = 0.0
    for cls in classes.classes:
        operators, slice_ = cls.slice.operators, cls.slice
        events = slice_.events[slice(*slice_.steady)]
        events = events[events["kind"] == EventKind.OP]
        every = np.bincount(events["ref"], minlength=len(operators))
        once = np.bincount(events["ref"][events["phase"] != Phase.RECOMPUTE], minlength=len(operators))
        for row in np.flatnonzero(every):
            counted = counted_flops(operators[row])
            if counted:
                each = np.outer((counted, executed_flops(operators[row])), (once[row], every[row]))
                flops[units_of(operators[row])] += len(cls.members) * each.ravel()
        lookups += len(cls.members) * _lookups(operators, events) / _copies(slice_)
    steps = classes.classes[0].slice.period
    return StepWork(
        (round(lookups / steps) or None) if tokens is None else tokens,
        {name: done / steps for name, done in flops.items()},
    )


@dataclass(frozen=True)
class Utilisation:
    """Model and hardware FLOPs utilisation of a step, and what has to be said of them."""

    mfu: float
    hfu: float
    notes: tuple[Note, ...] = ()


def utilisation(
    work: StepWork, seconds: float, world_size: int, device: Device, *, measured: bool = False
) -> Utilisation:
    """The seconds that the devices would need at peak, over those that they take.

    Causal attention counts in full, as in published figures, although kernels leave its masked half out;
    where that would give more than 1, which happens to attention alone on long sequences, what kernels
    compute counts. Where also that exceeds 1, a profile (``measured``) contradicts the device's peaks, which
    is told, or the cost model has an operator faster than its units.

    Raises:
        UserError: a dtype has no peak.
        RuntimeError: an operator was modelled faster than the device's peak.
    """
    notes: list[Note] = []
    for dtype in work.flops:
        units = device.units(dtype)
        if DTYPE_BYTES.get(units, 4) != DTYPE_BYTES.get(dtype, 4):  # tf32 is float32 in memory
            text = f"{device.name} has no units for {dtype}: its products are costed at the rate of {units}"
            notes.append(Note(text, NoteKind.APPROXIMATION))

    ideal = sum((flops / device.peak(dtype) for dtype, flops in work.flops.items()), np.zeros(4))
    shares = (ideal / (seconds * world_size) if seconds > 0 else ideal * 0.0).tolist()
    mfu, hfu = shares[MODEL], shares[HARDWARE]
    if hfu > 1.0:
        mfu, hfu = shares[MODEL_RUN], shares[HARDWARE_RUN]
        if hfu <= 1.0:
            text = (
                "MFU and HFU count what kernels compute (causal attention without its masked half, gradients"
                " of grouped convolutions by group): in full it is more than 1"
            )
            notes.append(Note(text, NoteKind.APPROXIMATION))
    if hfu > 1.0 + 1e-9:
        if not measured:
            raise RuntimeError(
                f"a mistake of windtunnel's: its model of {device.name} runs operators at {hfu:.0%} of peak"
            )
        text = (
            f"the profile has operators at {hfu:.0%} of the peak that {device.name} is said to have"
            f" (peak_flops.{device.units(work.dtype)}): MFU and HFU are at most 1"
        )
        notes.append(Note(text))
    return Utilisation(min(mfu, 1.0), min(hfu, 1.0), tuple(notes))


def _lookups(operators: list[Operator], events: NDArray[np.void]) -> float:
    """Entries of sequences looked up by operators' ``events``, in the table that is asked most.

    A table is one by its number of rows and the module that asks: a model with several embeddings of its
    tokens (one for the values of each layer, say) reads each token once in each. What is looked up beyond the
    gradients of tables of that size is not trained: a teacher with a table like it asks, too, and so does who
    generates. Indices without a sequence dimension (bags) are no tokens.
    """
    rows = [row for row, op in enumerate(operators) if _looks_up(op)]
    asked = events[np.isin(events["ref"], rows) & (events["phase"] != Phase.RECOMPUTE)]
    trained: dict[object, float] = defaultdict(float)
    lookups: dict[tuple[object, int], float] = defaultdict(float)
    pairs, counts = np.unique(np.stack([asked["ref"], asked["scope"]]), axis=1, return_counts=True)
    for row, scope, times in zip(*pairs.tolist(), counts.tolist(), strict=True):
        op = operators[row]
        # Of the gradient: (gradient, indices, rows of the table, ...); of the look-up: (table, indices).
        if base_name(op.name) == "embedding_dense_backward":
            trained[op.inputs[2]] += float(times) * op.tensors()[1].numel
        else:
            lookups[op.tensors()[0].shape[0], scope] += float(times) * op.tensors()[1].numel
    both = [min(count, trained[size]) for (size, _), count in lookups.items() if size in trained]
    return max(both or trained.values() or lookups.values(), default=0.0)


def _copies(slice_: Slice) -> int:
    """How many ranks look the same tokens up: those of groups that are called so (``tp``, Lightning's
    ``tensor_parallel``), and of groups without a name that add up activations in forward, as tensor
    parallelism does and data parallelism never. A mesh that is made of another one's dimensions has groups of
    its own for the same ranks."""
    tokens = max((op.tensors()[1].numel for op in slice_.operators if _looks_up(op)), default=0)
    events = slice_.events[slice(*slice_.steady)]
    called = events[(events["kind"] == EventKind.COLLECTIVE) & (events["phase"] == Phase.FORWARD)]["ref"]
    calls = [slice_.collectives[row] for row in np.unique(called)]
    adding = {
        call.group
        for call in calls
        if call.kind in ("all_reduce", "reduce_scatter") and call.in_bytes >= tokens  # a byte for each
    }
    distinct = {
        group.ranks
        for row, group in enumerate(slice_.groups)
        if group.label == "tp" or group.label.startswith("tensor") or (row in adding and not group.label)
    }
    return int(np.prod([len(ranks) for ranks in distinct] or [1]))


def _looks_up(op: Operator) -> bool:
    """Whether an operator looks sequences up in a table, or is the gradient of that."""
    if base_name(op.name) not in ("embedding", "embedding_dense_backward"):
        return False
    tensors = op.tensors()
    return len(tensors) >= 2 and len(tensors[1].shape) >= 2
