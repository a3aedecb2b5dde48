"""``IngestDataset(..., workers=0)``: the batches of the service, in its order, without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from support.ingest import KEYS, ROWS, serving, table, whole
from windtunnel.base.errors import HostError, UserError
from windtunnel.data.ingest import IngestDataset, IngestSession


@pytest.fixture
def session(tmp_path: Path) -> IngestSession:
    return replace(table(tmp_path), shuffle=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(KEYS.secret)
    return path


def rows(batches: Any, most: int | None = None) -> list[int]:
    numbers: list[int] = []
    for number, batch in enumerate(batches, 1):
        numbers += batch["row"].tolist()
        if number == most:
            break
    return numbers


def test_batches_and_their_order_are_those_of_the_service(
    session: IngestSession, tmp_path: Path, secret: Path
) -> None:
    here = IngestDataset(session, workers=0)
    with serving(session, tmp_path / "m") as master:
        there = IngestDataset(master.address, secret, ordered=True)
        orders = []
        for _ in range(session.epochs):
            ours, theirs = list(here), list(there)
            assert len(ours) == len(theirs)
            for batch, other in zip(ours, theirs, strict=True):
                assert torch.equal(batch["row"], other["row"]) and torch.equal(batch["x"], other["x"])
                assert all(map(torch.equal, batch["ids"], other["ids"]))
            orders.append(rows(ours))
            assert here.state_dict() == there.state_dict()
            assert (here.counts.steps, here.counts.rows) == (there.counts.steps, there.counts.rows)
        there.close()
    assert all(map(whole, orders)) and orders[0] != orders[1]
    with pytest.raises(UserError, match="all epochs of the session are over; it has 3"):
        next(iter(here))


def test_a_file_of_a_session_without_any_process(session: IngestSession, tmp_path: Path) -> None:
    path = tmp_path / "session.yaml"
    path.write_text(f"{{version: 1, table: {session.table}, columns: [row, x], batch: 64, split_rows: 500}}")
    before = psutil.Process().children(recursive=True)
    dataset = IngestDataset(path, workers=0)
    assert whole(rows(DataLoader(dataset, batch_size=None)))
    assert psutil.Process().children(recursive=True) == before
    assert dataset.counts.stalled >= dataset.counts.first > 0


def test_what_was_handed_out_is_not_handed_out_again(
    session: IngestSession, tmp_path: Path, secret: Path
) -> None:
    """By an iterator that is left, by a state, and by one that goes to a service and comes back."""
    dataset = IngestDataset(session, workers=0)
    first = rows(dataset, 30)
    assert whole(first + rows(dataset))
    straight = rows(dataset)
    for step in (1, 8, 25, 125):  # within a split, at its end, and after the last
        other = IngestDataset(session, workers=0)
        rows(other)
        before = rows(other, step)
        state = other.state_dict()
        again = IngestDataset(session, workers=0)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert before + rows(again) == straight
    other = IngestDataset(session, workers=0)
    numbers = rows(other, 21)
    with serving(session, tmp_path / "m") as master:
        service = IngestDataset(master.address, secret)
        service.load_state_dict(other.state_dict())
        numbers += rows(service, 21)
        other.load_state_dict(service.state_dict())
        service.close()
    assert whole(numbers + rows(other))


def test_a_state_of_a_whole_epoch_goes_on_with_the_next(
    session: IngestSession, tmp_path: Path, secret: Path
) -> None:
    """As the dataset itself would: a loop that counts epochs has each of them, wherever it was ended."""
    here = IngestDataset(session, workers=0)
    orders = [rows(here), rows(here)]
    here = IngestDataset(session, workers=0)
    assert rows(here) == orders[0]
    state = here.state_dict()
    again = IngestDataset(session, workers=0)
    again.load_state_dict(state)
    assert rows(again) == orders[1] and again.counts.rows == ROWS and again.state_dict()["epoch"] == 1
    with serving(session, tmp_path / "m") as master:
        service = IngestDataset(master.address, secret, ordered=True)
        service.load_state_dict(state)
        assert rows(service) == orders[1] and service.state_dict() == again.state_dict()
        service.load_state_dict({"epoch": 3, "marks": {"done": "", "next": []}})
        with pytest.raises(UserError, match="all epochs of the session are over; it has 3"):
            next(iter(service))


def test_ranks_share_the_splits(session: IngestSession) -> None:
    by_rank = [rows(IngestDataset(session, workers=0, rank=rank, world=3)) for rank in range(3)]
    assert all(by_rank) and whole([row for numbers in by_rank for row in numbers])
    many = [rows(IngestDataset(session, workers=0, rank=rank, world=20)) for rank in range(20)]
    assert [] in many and whole([row for numbers in many for row in numbers]), "there are 16 splits"


def test_splits_that_the_filter_empties(session: IngestSession) -> None:
    few = replace(session, where=(("x", "in", (5.0, 3000.5)),))
    dataset = IngestDataset(few, workers=0)
    assert [sorted(rows(dataset)) for _ in range(2)] == [[10, 6001]] * 2


def test_what_is_refused(session: IngestSession, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="workers is 3, accepted are 0"):
        IngestDataset(session, workers=3)
    with pytest.raises(UserError, match="address is of type IngestSession, accepted is a master's HOST:PORT"):
        IngestDataset(session)
    with pytest.raises(UserError, match=r"none\.yaml"):
        next(iter(IngestDataset(tmp_path / "none.yaml", workers=0)))
    with pytest.raises(UserError, match="keyed is 'lists', accepted is none where no column has lists"):
        next(iter(IngestDataset(replace(session, columns=("row",)), workers=0, keyed="lists")))
    dataset = IngestDataset(session, workers=0)
    with pytest.raises(UserError, match=r"a state with \['model'\], accepted is one of its state_dict"):
        dataset.load_state_dict({"model": {}})
    with pytest.raises(UserError, match="accepted is num_workers=0"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    old, new = iter(dataset), iter(dataset)
    next(old), next(new)
    with pytest.raises(HostError, match="it was begun anew"):
        next(old)
    for state in (
        {"epoch": 3, "marks": {"done": "", "next": []}},
        {"epoch": 0, "marks": {"done": "99", "next": []}},
    ):
        dataset.load_state_dict(state)
        with pytest.raises(UserError, match=r"accepted is one of .* with 3 epochs, 16 splits"):
            next(iter(dataset))
    data = bytearray(Path(session.table).read_bytes())
    data[4:60_000] = b"\xff" * 59_996
    Path(session.table).write_bytes(data)
    with pytest.raises(UserError, match=r"table\.parquet.*row group"):
        rows(IngestDataset(session, workers=0))
