"""Which operators of a compiled region become one kernel, and what traffic is left to each.

A declared approximation of what Inductor does. A chain is a run of neighbours in one region, all of fusable
kinds (views do not break it). Within a chain a tensor that one operator writes and a later one reads is
neither written nor read: Inductor keeps it in registers, and its partitioner recomputes cheap pointwise
results in backward instead of saving them. Operators in a slice do not say which tensor is which, so an
input is taken for an earlier output when shape, dtype and strides are equal; each output is consumed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windtunnel.training.emulate.cost.kinds import FUSABLE, kind_of
from windtunnel.training.emulate.cost.traffic import moved_bytes, stored_bytes
from windtunnel.training.emulate.graph import Operator, TensorMeta


@dataclass(frozen=True, slots=True)
class Share:
    """What is left of an operator inside a fused kernel: ``bytes``, and whether it pays for the launch."""

    bytes: float
    first: bool


def traffic_of_fused(ops: Sequence[Operator]) -> dict[int, Share]:
    """The `Share` of each operator that stands in a chain of two or more, by its position."""
    shares: dict[int, Share] = {}
    for chain in _chains(ops):
        moved = {index: moved_bytes(ops[index]) for index in chain}
        pending: Counter[TensorMeta] = Counter()
        writer: dict[TensorMeta, list[int]] = {}
        for index in chain:
            for tensor in ops[index].tensors():
                if pending[tensor] > 0:
                    pending[tensor] -= 1
                    moved[index] -= stored_bytes(tensor)
                    moved[writer[tensor].pop()] -= stored_bytes(tensor)
            for tensor in ops[index].outputs:
                pending[tensor] += 1
                writer.setdefault(tensor, []).append(index)
        for position, index in enumerate(chain):
            shares[index] = Share(max(0.0, moved[index]), position == 0)
    return shares


def _chains(ops: Sequence[Operator]) -> Iterator[list[int]]:
    chain: list[int] = []
    region = 0
    for index, op in enumerate(ops):
        kind = kind_of(op)
        joins = op.region > 0 and kind in FUSABLE
        if chain and (not joins or op.region != region):
            if len(chain) > 1:
                yield chain
            chain = []
        if joins and kind != "view":
            chain.append(index)
            region = op.region
    if len(chain) > 1:
        yield chain
