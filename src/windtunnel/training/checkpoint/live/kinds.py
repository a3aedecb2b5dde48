"""Of which kind what a rank saves is: so that what is lost can be told from what is merely random.

- *shared*: tensors that all ranks hold alike and that have a shard of their own (`snapshot.agree_alike`);
- *sharded*: this rank's pieces of DTensors; where a mesh replicates, other ranks hold the same;
- *alike*: whatever else all ranks hold alike (schedulers, cursors, groups of optimizers): in each rank's
  shard, small, and compared by a digest at every commit;
- *random*: the states of this rank's generators;
- all else is the rank's *own*.

A rank that has nothing of its own is a *twin* of those with the same pieces: if its shard is lost in every
copy, one of theirs stands in for it, and only its generators are seeded anew. Ranks agree on this when a
layout is made, and every layout says it of all ranks, since those of the lost one are lost, too.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from windtunnel.training.checkpoint.live import objects, state
from windtunnel.training.checkpoint.live.snapshot import Tensors, fingerprints

MOST_TENSORS = 64
MOST_BYTES = 64 << 10
"""Of tensors beside the shared ones that are compared at every commit; a state with more has parts of its
own."""


@dataclass(frozen=True)
class Kinds:
    """``alike``: names of tensors and objects. ``random``: items of the state that are generators of this
    rank alone. ``bare``: objects that consist of tensors only. ``twins``: for each rank the lowest one with
    the same pieces, -1 where it has something of its own. ``pieces``: of this rank, in short. ``seed``: of
    the run, as rank 0 had it."""

    alike: frozenset[str]
    random: tuple[str, ...]
    twins: tuple[int, ...]
    pieces: str
    seed: int
    bare: frozenset[str]


def agree(
    job: Any,
    program: state.State,
    tensors: Tensors,
    others: dict[str, Any],
    shared: frozenset[str] | None,
    key: str,
) -> Kinds:
    """What is of which kind now. All ranks call it; ``key`` is its own."""
    drawn = {state.RNG, *(item for item, value in program.items() if _draws(value))}
    small, rest = _small(tensors, shared or frozenset())
    values = {name: _print(value) for name, value in others.items() if not isinstance(value, objects.Ref)}
    prints = {**fingerprints(small), **values}  # a tensor alone goes by the same name as its object
    prints = {name: found for name, found in prints.items() if name.partition("/")[0] != state.RNG}
    told: dict[str, Any] = {
        "prints": prints,
        "own": rest,
        "pieces": _pieces(tensors),
        "seed": torch.initial_seed(),
    }
    said = job.agree(f"kinds/{key}", told)
    every = [said[rank] for rank in sorted(said)]
    alike = {n for n, p in prints.items() if all(other["prints"].get(n) == p for other in every)}
    # an item is random as a whole or not at all: its object and its tensor go together
    own_draws = {item for item in drawn if item == state.RNG or not _under(item, prints) <= alike}
    alike = {name for name in alike if name.partition("/")[0] not in own_draws}

    def pieces(one: dict[str, Any]) -> str | None:
        names = {name for name in one["prints"] if name.partition("/")[0] not in own_draws}
        return None if one["own"] or not names <= alike else one["pieces"]

    classes = [pieces(one) for one in every]
    twins = tuple(-1 if one is None else classes.index(one) for one in classes)
    bare = frozenset(name for name, value in others.items() if _bare(value))
    return Kinds(frozenset(alike), tuple(sorted(own_draws)), twins, told["pieces"], every[0]["seed"], bare)


def digest(
    kinds: Kinds, rank: int, tensors: Tensors, others: dict[str, Any], shared: frozenset[str] | None
) -> str:
    """Of what should be alike: equal on all ranks if it is. One of its own where something came up that was
    of no kind when the ranks agreed."""
    small, rest = _small(tensors, shared or frozenset())
    kept = [(name, tensor) for name, tensor in small if name in kinds.alike]
    whole_names = [n for n, value in others.items() if not isinstance(value, objects.Ref)]
    names = {n for n in (*(n for n, _ in small), *whole_names) if n.partition("/")[0] not in kinds.random}
    if kinds.twins[rank] >= 0 and (rest or not names <= kinds.alike or _pieces(tensors) != kinds.pieces):
        return f"rank{rank}"
    whole = xxhash.xxh3_128()
    for name, found in sorted(fingerprints(kept).items()):
        whole.update(f"{name} {found}\n".encode())
    for name in sorted((kinds.alike & others.keys()) - kinds.bare):
        whole.update(f"{name} {_print(others[name])}\n".encode())
    return whole.hexdigest()


def seed_for(run: int, rank: int, step: int) -> int:
    """From which the generators of a rank that has lost theirs go on."""
    return xxhash.xxh3_64_intdigest(f"{run}/{rank}/{step}".encode())


def _draws(value: Any) -> bool:
    return isinstance(value, torch.Generator | np.random.Generator | random.Random)


def _under(item: str, names: dict[str, Any]) -> set[str]:
    return {name for name in names if name == item or name.startswith(f"{item}/")}


def _small(tensors: Tensors, shared: frozenset[str]) -> tuple[Tensors, bool]:
    """Tensors that are no pieces and not shared, if they are few and small; else none, and True."""
    found = [
        (name, tensor)
        for name, tensor in tensors
        if name not in shared
        and not isinstance(tensor, DTensor)
        and not name.startswith(f"{state.RNG}/")
        and tensor.numel()
    ]
    much = len(found) > MOST_TENSORS or sum(tensor.nbytes for _, tensor in found) > MOST_BYTES
    return ([], True) if much else (found, False)


def _pieces(tensors: Tensors) -> str:
    """Which pieces of DTensors lie here, in short; the same for ranks that hold the same."""
    whole = xxhash.xxh3_64()
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            entry = state.entry(name, tensor, 0)
            whole.update(f"{name} {entry.dtype} {entry.start} {entry.shape}\n".encode())
    return whole.hexdigest()


def _bare(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_bare(inner) for inner in value.values())
    if type(value) in (list, tuple):
        return all(_bare(inner) for inner in value)
    return isinstance(value, objects.Ref)


def _print(value: Any) -> str:
    whole = xxhash.xxh3_64()
    whole.update(repr(_canonical(value)).encode())
    return whole.hexdigest()


def _canonical(value: Any) -> Hashable:
    """Equal for equal values, in whichever process they are (a pickle also tells what is shared in them)."""
    if isinstance(value, dict):
        items = tuple((_canonical(key), _canonical(inner)) for key, inner in value.items())
        return type(value).__name__, items
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(_canonical(inner) for inner in value)
    if isinstance(value, set | frozenset):
        return "set", tuple(sorted(repr(_canonical(inner)) for inner in value))
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, objects.Ref):
        return "tensor", value.name
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return cast(Hashable, value)
    return pickle.dumps(value, protocol=5)
