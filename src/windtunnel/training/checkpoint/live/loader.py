"""Data loaders in the state: torchdata's `StatefulDataLoader`, which says itself where it is in its epoch.

Two things are added. A loader that nobody has iterated yet is not asked for its state: it would begin an
epoch for that, and draw. And one that is restored begins its iteration at once, before the global generators
are put back, so that what it draws then shifts nobody's random numbers. So the epoch that `set_epoch` told a
sampler is saved, and put before.

What its state has not is said as a doubt: what workers draw at random, and the order of a sampler that draws
it from a global generator and has no state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from windtunnel.base.errors import UserError

_STATEFUL = "torchdata.stateful_dataloader"


def require_stateful(state: dict[str, Any]) -> None:
    """Raises:
    UserError: a loader in ``state`` does not know its place."""
    for item, value in state.items():
        if isinstance(value, DataLoader) and not _is_stateful(value):
            raise UserError(
                f"state {item}: a {type(value).__name__} does not say where it is in its epoch; torchdata's "
                "StatefulDataLoader, which takes what DataLoader takes, is accepted"
            )


def state_of(loader: Any) -> dict[str, Any]:
    """What is saved of a loader: its own state ({} where nobody has iterated it), its sampler's epoch, and
    the generator that it was given."""
    begun = loader._iterator is not None
    return {
        "loader": loader.state_dict() if begun else dict(loader.next_iter_state or {}),
        "epoch": getattr(_sampler(loader), "epoch", None),
        "generator": None if loader.generator is None else loader.generator.get_state(),
    }


def go_on(loader: Any, state: dict[str, Any]) -> None:
    """Have the next iteration of a loader go on where ``state`` was taken."""
    if state["epoch"] is not None:
        _sampler(loader).set_epoch(state["epoch"])
    loader.load_state_dict(state["loader"])
    if state["loader"]:
        loader.state_dict()  # makes the iterator that is then iterated
    if state["generator"] is not None:
        loader.generator.set_state(state["generator"])


def doubts(state: dict[str, Any]) -> list[str]:
    """Why the data of a run with failures may differ from those of one without; sentences."""
    reasons: set[str] = set()
    for item, value in state.items():
        if not isinstance(value, DataLoader):
            continue
        sampler = _sampler(value)
        if isinstance(sampler, Sampler) and not _goes_on(sampler):
            reasons.add(f"loader {item}: the order that its {type(sampler).__name__} draws is drawn anew")
        if value.num_workers:
            reasons.add(f"loader {item}: what its workers draw at random is drawn anew after a failure")
        if value.num_workers and not getattr(value, "in_order", True):
            reasons.add(f"loader {item}: with in_order=False its batches come in any order")
    return sorted(reasons)


def read_outside(state: dict[str, Any]) -> list[str]:
    """Of loaders that are in the midst of an epoch and not in ``state``, a sentence each. Looks at every
    object that there is, so it is not for every step."""
    inside = [getattr(value, "_iterator", None) for value in state.values() if isinstance(value, DataLoader)]
    names: set[str] = set()
    for iterator in _iterators():
        if any(iterator is other for other in inside):
            continue
        if _is_placed(iterator._index_sampler):
            return []  # by a framework, whose adapter keeps the place; its other loaders only validate
        if 0 < iterator._num_yielded < _length(iterator):
            names.add(
                f"a {type(iterator._dataset).__name__} is read by a loader that is not in the state, so its "
                "place in the epoch and its random numbers are not saved"
            )
    return sorted(names)


def _iterators() -> Iterator[Any]:
    """All iterators of loaders. An object refers to its class; a list of all objects would hold those, too,
    that other threads are just building, and a tuple that somebody holds cannot be built on."""
    kinds = [_BaseDataLoaderIter]
    for kind in kinds:
        kinds += kind.__subclasses__()
    yield from (user for user in gc.get_referrers(*kinds) if type(user) in kinds)


def _is_stateful(loader: Any) -> bool:
    return any(kind.__module__.startswith(_STATEFUL) for kind in type(loader).__mro__)


def _sampler(loader: Any) -> Any:
    """What says which samples come in which order."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return getattr(outer, "sampler", outer)


def _goes_on(sampler: Any) -> bool:
    """Whether the order that it gave comes again."""
    return (
        isinstance(sampler, SequentialSampler | DistributedSampler)
        or hasattr(sampler, "state_dict")
        or type(sampler).__module__.startswith(_STATEFUL)
    )


def _is_placed(sampler: Any) -> bool:
    """Whether an adapter's cursor keeps the place of what reads by this sampler."""
    while sampler is not None and not getattr(sampler, "keeps_place", False):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler is not None


def _length(iterator: Any) -> float:
    try:
        return len(iterator)
    except TypeError:  # nobody knows
        return float("inf")
