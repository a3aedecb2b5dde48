"""A loop that is broken off after any of its batches, and gone on with from the cursor's place, sees and
draws what one sees and draws that nobody broke off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

from windtunnel.base.errors import UserError  # noqa: E402
from windtunnel.training.checkpoint.adapters import cursor as cursors  # noqa: E402
from windtunnel.training.checkpoint.live import objects  # noqa: E402

EPOCHS, COUNT = 3, 7


class Noisy(Dataset):
    """Draws from all three global generators for each sample."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(1)) + random.random() + float(np.random.rand())


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[float]:
        return (float(number) for number in range(COUNT))


def of_the_global() -> Any:
    return DataLoader(Noisy(), batch_size=2, shuffle=True)


def single_samples() -> Any:
    return DataLoader(Noisy(), batch_size=None, shuffle=True)


def stream() -> Any:
    return DataLoader(Endless(), batch_size=2)


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """As loops do that must know which batch is the last."""
    held = list(islice(batches, 1))
    while held:
        held += islice(batches, 1)
        yield held.pop(0)


def seeds() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def loop(loader: Any, looks_ahead: bool, stop: int = -1, saved: Any = None) -> tuple[list[Any], Any]:
    """What each step saw and drew, and what was saved after step ``stop``."""
    seeds()
    cursor = cursors.place_in(loader)
    assert cursor is not None and cursors.place_in(loader) is cursor
    got: list[Any] = []
    first = 0
    if saved is not None:
        first, place = saved
        torch.rand(3)  # what a program does before it gets here is another matter than what it did then
        cursor.go_to(place)
    for epoch in range(first, EPOCHS):
        count, dropped = 0, 0
        if saved is not None:
            count, saved = place["seen"], None
            dropped = 0 if cursor.skips else count
        batches = islice(iter(loader), dropped, None)
        for batch in ahead(batches) if looks_ahead else batches:
            if not cursor.skips:
                cursor.settle()
            got.append((epoch, torch.as_tensor(batch).tolist(), float(torch.rand(1)), random.random()))
            count += 1
            if len(got) == stop:
                return got, (epoch, objects.unpack(objects.pack({"place": cursor.place(count)}))["place"])
        cursor.settle()
        got.append((epoch, float(torch.rand(1)), float(np.random.rand())))
    return got, None


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("make", [of_the_global, single_samples, stream])
def test_it_goes_on_after_any_batch(make: Any, looks_ahead: bool) -> None:
    whole, _ = loop(make(), looks_ahead)
    for stop in range(1, len(whole)):
        begun, saved = loop(make(), looks_ahead, stop)
        if saved is not None:
            rest, _ = loop(make(), looks_ahead, saved=saved)
            assert begun + rest == whole, stop


def test_the_sampler_shows_through() -> None:
    loader = DataLoader(range(6), batch_size=4, drop_last=True)
    cursors.place_in(loader)
    assert (len(loader), loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (1, 4, True)
    assert not hasattr(loader.batch_sampler, "set_epoch")
    assert cursors.place_in([1, 2]) is None


def test_a_place_in_other_parts_of_the_data_is_refused() -> None:
    cursors.require_world(2, SimpleNamespace(world=2))
    with pytest.raises(UserError, match="it is of 2 ranks, the job has 3 now"):
        cursors.require_world(2, SimpleNamespace(world=3))
