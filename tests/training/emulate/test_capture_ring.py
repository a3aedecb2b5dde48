"""PyTorch's own context parallelism: what the ring moves, what it computes, and what it waits for."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from capturing import SCRIPTS, capture, steady_events

from windtunnel.training.emulate.graph import EventKind, Slice
from windtunnel.training.emulate.twin.costs.work import kind_of

sys.path.insert(0, str(SCRIPTS))
RANKS = 4


def ring(*arguments: str) -> list[Slice]:
    return capture("ring.py", *arguments, ranks=tuple(range(RANKS)), cluster=f"h100-sxm:1x{RANKS}")


def order(slice_: Slice) -> str:
    """The steady step as letters: (g)ather, (e)xchange, (f)orward and (b)ackward kernels, (w)ait."""
    letters = []
    for event in steady_events(slice_):
        if event["kind"] == EventKind.COLLECTIVE:
            letters.append({"all_gather": "g", "all_to_all": "e"}[slice_.collectives[event["ref"]].kind])
        elif event["kind"] == EventKind.WORK_WAIT:
            letters.append("w")
        elif event["kind"] == EventKind.OP and kind_of(slice_.operators[event["ref"]]) == "attention":
            letters.append("b" if "backward" in slice_.operators[event["ref"]].name else "f")
    return "".join(letters)


def test_it_moves_what_the_algorithm_moves() -> None:
    import ring as script

    share = script.BATCH * script.HEADS * script.LENGTH * script.WIDTH // RANKS
    keys_and_values, gradients = 2 * share * 2, 2 * share * 4  # in bfloat16, and added up in float32
    for slice_ in ring():
        counted = Counter(
            slice_.collectives[event["ref"]]
            for event in steady_events(slice_)
            if event["kind"] == EventKind.COLLECTIVE
        )
        moved = {(c.kind, c.dtype, c.in_bytes, c.out_bytes): times for c, times in counted.items()}
        assert moved == {
            ("all_gather", "bfloat16", keys_and_values, RANKS * keys_and_values): 2,  # forward and backward
            ("all_to_all", "float32", gradients, gradients): RANKS,  # once round, until they are home again
        }


@pytest.mark.parametrize(("arguments", "forward", "backward"), [
    # The first block is computed while the others' keys come, and gradients travel during the next one.
    ((), "gfwfff", "gbewbwebwebwew"),
    # In a traced graph the wait stands behind the collective.
    (("--compile",), "gwffff", "gwbewbewbewbew"),
], ids=["eager", "compile"])  # fmt: skip
def test_what_it_waits_for(arguments: tuple[str, ...], forward: str, backward: str) -> None:
    for slice_ in ring(*arguments):
        assert order(slice_) == forward + backward
