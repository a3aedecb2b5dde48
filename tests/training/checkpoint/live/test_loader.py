"""A `StatefulDataLoader` in the state goes on in the midst of an epoch with what it would have given, and
nothing that the program draws is changed by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live import objects
from windtunnel.training.checkpoint.live.objects import loader_doubts, read_outside

stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
COUNT = 11
Batch = tuple[list[Any], float, float, float]


def sample(index: int) -> torch.Tensor:
    """One with augmentations from all of the global generators."""
    return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Still(Samples):
    """Nothing is drawn."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Place:
    """An iterator that says itself where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == COUNT:
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Placed(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Place:
        return Place()


class Lazy(Sampler[int]):
    """It draws from a global generator for every sample."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(COUNT) for _ in range(COUNT))

    def __len__(self) -> int:
        return COUNT


LOADERS: dict[str, Callable[[], Any]] = {
    "here": lambda: stateful(Samples(), 2, shuffle=True),
    "own generator": lambda: stateful(Samples(), 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "workers": lambda: stateful(Still(), 2, shuffle=True, num_workers=2),
    "set_epoch": lambda: stateful(Samples(), 1, sampler=DistributedSampler(Samples(), 2, 0)),
    "placed stream": lambda: stateful(Placed(), 2),
}


def epochs(loader: Any, epoch: int, saves: list[Any] | None = None, until: int = 2) -> list[Batch]:
    """Two epochs of training, from the rest of ``epoch`` on: batches, and what the model drew meanwhile. What
    a checkpoint would have goes to ``saves``, after each batch and between epochs."""
    batches: list[Batch] = []

    def save(epoch: int) -> None:
        if saves is not None:
            tensors: dict[str, torch.Tensor] = {}
            bare = objects.skeleton(
                objects.saved_of(loader), "", lambda name, tensor: tensors.update({name: tensor.clone()})
            )
            plain = objects.unpack(objects.pack({"loader": bare}))["loader"]
            state = objects.flesh(plain, tensors.__getitem__)
            saves.append((epoch, len(batches), state, objects.generators()))

    for number in range(epoch, until):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(number)
        for batch in loader:
            batches.append((batch.tolist(), torch.rand(()).item(), random.random(), np.random.rand()))
            save(number)
        save(number + 1)
    return batches


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_of_an_epoch(kind: str) -> None:
    make = LOADERS[kind]
    seed(1)
    saves: list[Any] = []
    all_of_it = epochs(make(), 0, saves)
    between = next(i for i, (epoch, *_) in enumerate(saves) if epoch == 1)
    for epoch, taken, state, drawn in (saves[1], saves[between - 1], saves[between], saves[between + 2]):
        seed(99)
        loader = make()
        objects.put_saved({}, "", loader, state)
        objects.put_generators(drawn, None)
        assert epochs(loader, epoch) == all_of_it[taken:], (epoch, taken)


def test_one_that_nobody_has_iterated_draws_nothing_when_it_is_saved() -> None:
    loader = LOADERS["here"]()
    seed(3)
    before = torch.rand(())
    seed(3)
    saved = objects.saved_of(loader)
    assert torch.rand(()) == before and saved["loader"] == {}
    objects.put_saved({}, "", loader, saved)
    assert len(list(loader)) == 6


def test_what_a_loader_does_not_know_is_told() -> None:
    lazy, workers = stateful(Samples(), 2, sampler=Lazy()), LOADERS["workers"]()
    unordered = stateful(Samples(), 2, num_workers=1, in_order=False)
    drawn = stateful(Samples(), 2, sampler=RandomSampler(Samples()))
    doubts = loader_doubts({"lazy": lazy, "workers": workers, "unordered": unordered, "drawn": drawn})
    words = "drawn: the order that its RandomSampler", "lazy: the order that its Lazy", "in_order=False"
    for word in (*words, "workers: what its workers draw"):
        assert sum(word in doubt for doubt in doubts) == 1, word
    assert loader_doubts({"fine": LOADERS["here"](), "epoch": LOADERS["set_epoch"]()}) == []


def test_a_loader_outside_of_the_state_is_told_while_it_is_read() -> None:
    inside, apart = LOADERS["here"](), DataLoader(Still(), 2)
    next(iter(inside))
    reading = iter(apart)
    assert not any("Still" in doubt for doubt in read_outside({"inside": inside}))  # nothing was taken yet
    next(reading)
    doubts = read_outside({"inside": inside})
    assert sum("a Still is read by a loader that is not in the state" in doubt for doubt in doubts) == 1
    assert not any("Samples" in doubt for doubt in doubts)
    for _ in reading:  # read to its end between two steps it does no harm
        pass
    assert not any("Still" in doubt for doubt in read_outside({"inside": inside}))


def test_of_a_framework_that_reads_by_a_cursor_other_loaders_are_no_doubt() -> None:
    from windtunnel.training.checkpoint.adapters.cursor import place_in

    training, validation = DataLoader(Still(), 2), DataLoader(Samples(), 2)
    place_in(training)
    reading, checking = iter(training), iter(validation)
    next(reading), next(checking)
    assert read_outside({}) == []


def test_torch_is_as_it_was() -> None:
    from torch.utils.data import dataloader
    from torch.utils.data._utils import fetch

    assert PeerCheckpointer  # with all that it imports
    for kind in (dataloader._BaseDataLoaderIter, fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        assert all(value.__module__ == kind.__module__ for value in vars(kind).values() if callable(value))
