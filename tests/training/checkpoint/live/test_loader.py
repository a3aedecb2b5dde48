"""A loader that is followed goes on in the midst of an epoch with what it would have given, and nothing that
the program draws is changed by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live import objects
from windtunnel.training.checkpoint.live.loader import doubts, follow, require_followed

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


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, ways = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(sample, range(first, COUNT, ways))


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
        return sample(self.at - 1)

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


def stateful(*arguments: Any, **options: Any) -> DataLoader[Any]:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    made: DataLoader[Any] = module.StatefulDataLoader(*arguments, **options)
    return made


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "here": lambda: DataLoader(Samples(), 2, shuffle=True),
    "workers": lambda: DataLoader(Samples(), 2, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(
        Samples(), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "own generator": lambda: DataLoader(Samples(), 2, shuffle=True, generator=generator()),
    "with replacement": lambda: DataLoader(
        Samples(), 2, sampler=RandomSampler(Samples(), replacement=True, num_samples=40)
    ),
    "no batches": lambda: DataLoader(Samples(), None, sampler=SubsetRandomSampler(range(5)), num_workers=1),
    "set_epoch": lambda: DataLoader(Samples(), 1, sampler=DistributedSampler(Samples(), 2, 0)),
    "stream here": lambda: DataLoader(Stream(), 2),
    "stream in workers": lambda: DataLoader(Stream(), 2, num_workers=2),
    "stateful": lambda: stateful(Samples(), 2, shuffle=True, num_workers=2),
    "stateful stream": lambda: stateful(Placed(), 2),
    "stateful stream in a worker": lambda: stateful(Placed(), 2, num_workers=1),
}


def epochs(
    loader: DataLoader[Any], epoch: int, saves: list[Any] | None = None, until: int = 2
) -> list[Batch]:
    """Two epochs of training, from the rest of ``epoch`` on: batches, and what the model drew meanwhile. What
    a checkpoint would have goes to ``saves``, after each batch and between epochs."""
    found: list[Batch] = []

    def save(epoch: int) -> None:
        if saves is not None:
            packed = objects.pack({"loader": objects.skeleton(loader.state_dict(), "", lambda *_: None)})
            saves.append((epoch, len(found), objects.unpack(packed)["loader"], objects.generators()))

    for number in range(epoch, until):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(number)
        for batch in loader:
            found.append((batch.tolist(), torch.rand(()).item(), random.random(), np.random.rand()))
            save(number)
        save(number + 1)
    return found


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_of_an_epoch(kind: str) -> None:
    make = LOADERS[kind]
    seed(1)
    saves: list[Any] = []
    all_of_it = epochs(follow(make()), 0, saves)
    between = next(i for i, (epoch, *_) in enumerate(saves) if epoch == 1)
    for epoch, taken, state, drawn in (saves[1], saves[between - 1], saves[between], saves[between + 2]):
        seed(99)
        loader = follow(make())
        loader.load_state_dict(state)  # type: ignore[attr-defined]
        objects.put_generators(drawn, None)
        assert epochs(loader, epoch) == all_of_it[taken:], (epoch, taken)


def test_undisturbed_it_draws_what_a_plain_one_draws() -> None:
    for kind in ("here", "own generator", "set_epoch", "with replacement"):
        seed(3)
        plain = epochs(LOADERS[kind](), 0)
        seed(3)
        assert epochs(follow(LOADERS[kind]()), 0) == plain


def test_an_epoch_that_is_left_is_over() -> None:
    loader = follow(LOADERS["here"]())
    for _ in loader:
        break
    state = loader.state_dict()  # type: ignore[attr-defined]
    again = follow(LOADERS["here"]())
    again.load_state_dict(state)  # type: ignore[attr-defined]
    assert len(list(again)) == len(again) == 6


def test_ranks_that_changed_in_number_share_what_is_left() -> None:
    """Two ranks took three batches each: one alone goes on after six."""

    def made(world: int) -> DataLoader[Any]:
        return follow(DataLoader(range(20), 1, sampler=DistributedSampler(range(20), world, 0)))  # type: ignore[arg-type]

    loader = made(2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    alone = made(1)
    alone.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
    assert len(list(alone)) == 14


def test_another_epoch_of_the_sampler_is_refused() -> None:
    loader = follow(LOADERS["set_epoch"]())
    loader.sampler.set_epoch(4)  # type: ignore[attr-defined]
    iterator = iter(loader)
    next(iterator)
    again = follow(LOADERS["set_epoch"]())
    again.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"epoch 4 .* set_epoch\(0\)"):
        next(iter(again))


def test_what_cannot_be_followed_is_told() -> None:
    lazy = follow(DataLoader(Samples(), 2, sampler=Lazy()))
    assert len(list(lazy)) == 6
    unordered = follow(DataLoader(Samples(), 2, num_workers=1, in_order=False))
    apart = DataLoader(Samples(), 2)
    iterator = iter(apart)
    assert not any("Samples" in doubt for doubt in doubts({}))  # nothing of it was taken yet
    next(iterator)
    told = doubts({"lazy": lazy, "unordered": unordered, "fine": follow(LOADERS["here"]())})
    assert [word for word in ("Samples", "Lazy", "in_order") for doubt in told if word in doubt] == [
        "Samples",
        "Lazy",
        "in_order",
    ]
    with pytest.raises(UserError, match="state apart: the loader was not there"):
        require_followed({"apart": apart})
    for _ in iterator:  # read to its end between two steps it does no harm
        pass
    assert not any("Samples" in doubt for doubt in doubts({}))


class Around(DataLoader[torch.Tensor]):
    """It reads by another loader, of which nobody knows where it is."""

    def __iter__(self) -> Any:
        return iter(DataLoader(self.dataset, 2))


def test_a_loader_that_reads_in_a_way_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="a Around cannot be followed"):
        next(iter(follow(Around(Samples()))))


def test_what_accelerate_has_prepared_is_refused_and_its_cursor_is_no_doubt() -> None:
    prepared = pytest.importorskip("accelerate.data_loader")
    from windtunnel.training.checkpoint.adapters.cursor import place_in

    shard = prepared.DataLoaderShard(Samples())
    with pytest.raises(UserError, match="a DataLoaderShard cannot be followed"):
        follow(shard)
    place_in(shard)
    iterator = iter(shard.base_dataloader)
    next(iterator)
    assert doubts({}) == []
