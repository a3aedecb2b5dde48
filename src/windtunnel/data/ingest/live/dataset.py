"""Batches of a session as a PyTorch dataset.

    dataset = IngestDataset("127.0.0.1:7070", secret="ingest/secret")
    for batch in dataset:
        ...  # {"label": tensor, "dense/7": tensor, "sparse/3": Ragged(values, offsets)}

    dataset = IngestDataset("session.yaml", workers=0)  # the same batches, made in this process

Each turn through it is an epoch of the session; towards its end the next one is read ahead. Tensors share
memory with the Arrow batches they come from: they are not to be written to in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.utils.dlpack
from torch.utils.data import IterableDataset, get_worker_info

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.keys import VARIABLE, Keys
from windtunnel.base.tls import Certificates
from windtunnel.data.ingest import session as sessions
from windtunnel.data.ingest.live.client import EpochCounts, IngestClient
from windtunnel.data.ingest.live.local import LocalClient
from windtunnel.data.ingest.model import IngestSession


class Ragged(NamedTuple):
    """Lists of each row: row i has ``values[offsets[i]:offsets[i + 1]]``."""

    values: torch.Tensor
    offsets: torch.Tensor


class IngestDataset(IterableDataset[dict[str, Any]]):
    """Batches from the workers of the master at ``address``, as dictionaries of tensors by column.

    ``secret``: the file with the session's secret (its folder has one), as a path; default: what the
    environment's WINDTUNNEL_SECRET says. ``keyed``: a column's name for a TorchRec ``KeyedJaggedTensor`` of
    all ragged columns, which then are not given one by one. ``rank``, ``world``: of the ranks that share the
    session, default those of torch.distributed or of the environment. ``tls``: files of its certificate, key
    and CA. ``ordered``: batches come in the order of splits, which follows from session and epoch where one
    rank has all, and not in the order of arrival. Other settings: see `IngestClient`.

    ``workers``: 0 makes the batches here, in this process and when they are asked for, as ``ordered`` has
    them; ``address`` is then a session, or its file, and no master is needed. Ranks take splits in turn and
    end unevenly. None: those of the master.

    `state_dict` says which batches were handed out; after `load_state_dict` the next turn goes on behind
    them. It needs no DataLoader; one has ``batch_size=None`` and a ``collate_fn`` that returns its argument.
    """

    def __init__(
        self, address: str | Path | IngestSession, secret: str | Path | None = None, *,
        workers: int | None = None, keyed: str = "", rank: int | None = None, world: int | None = None,
        buffer: int = 4, ordered: bool = False, patience: float = 60.0, tls: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        if workers not in (None, 0):
            raise UserError(
                f"IngestDataset: workers is {workers!r}, accepted are 0, to make batches in this process, and"
                " None: a master has the workers (windtunnel ingest master --workers)"
            )
        if workers is None and not isinstance(address, str):
            raise UserError(
                f"IngestDataset: address is of type {type(address).__name__}, accepted is a master's"
                " HOST:PORT; a session is read in this process with workers=0"
            )
        self.address, self.workers, self.keyed, self.tls = address, workers, keyed, tuple(tls)
        self.secret = None if secret is None else Path(secret)
        self.buffer, self.ordered, self.patience = buffer, ordered, patience
        self.rank, self.world = _ranks(rank, world)
        self.counts = EpochCounts()
        self._client: IngestClient | LocalClient | None = None
        self._resume: dict[str, Any] | None = None
        self._over = False
        """The last turn had all of its epoch."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        loader, loaders = (info.id, info.num_workers) if info is not None else (0, 1)
        resume, self._resume = self._resume, None
        over = resume is not None and resume.get("over", False)
        if self._client is None:
            self._client = self._begun(loader, loaders, resume)
        else:
            self._client.begin()
        client, turn = self._client, self._client.turn
        self.counts, self._over = client.counts, False

        def next_batch() -> Any:
            nonlocal turn
            if client.turn != turn:
                raise HostError("IngestDataset: it was begun anew; go on with the iterator made last")
            batch = client.next()
            if batch is None and over and not client.counts.steps:
                # the trainer had all of that epoch: the turn is the next one's, as it had been without an end
                client.begin()
                turn, self.counts = client.turn, client.counts
                batch = client.next()
            return batch

        try:
            # no name here holds a batch: it goes when its trainer lets it, not while the next is waited for
            yield from iter(next_batch, None)
            self._over = True
        finally:
            if client.turn == turn:
                client.end()

    def _begun(self, loader: int, loaders: int, resume: dict[str, Any] | None) -> IngestClient | LocalClient:
        convert = partial(tensors, keyed=self.keyed)
        if self.workers is None:
            assert isinstance(self.address, str)
            name = f"{self.rank}.{loader}" if loaders > 1 else str(self.rank)
            return IngestClient(
                self.address, self._keys(), name, self.world * loaders, buffer=self.buffer,
                ordered=self.ordered, resume=resume, patience=self.patience, convert=convert,
            )  # fmt: skip
        if get_worker_info() is not None:
            raise UserError(
                "IngestDataset: workers=0 in a process of a DataLoader, accepted is num_workers=0; what makes"
                " batches in other processes is windtunnel ingest master"
            )
        address = self.address
        session = address if isinstance(address, IngestSession) else sessions.read(Path(address))
        return LocalClient(session, self.rank, self.world, resume=resume, convert=convert)

    def close(self) -> None:
        """Let go what is read ahead of a further turn; it ends with the process, too."""
        if self._client is not None:
            self._client.close()

    def state_dict(self) -> dict[str, Any]:
        """What was handed out, of the epoch: a few words for each thousand splits."""
        if self._client is not None:
            return {**self._client.state(), "over": self._over}
        return self._resume or {"epoch": 0, "marks": {"done": "", "next": []}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next turn goes on after ``state``; all ranks do so together. Raises UserError for no state."""
        if not {"epoch", "marks"} <= state.keys():
            raise UserError(f"IngestDataset: a state with {[*state]}, accepted is one of its state_dict")
        self.close()
        self._resume, self._client = state, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def _keys(self) -> Keys:
        keys = Keys.from_option(self.secret, "IngestDataset's secret")
        if keys is None:
            raise UserError(
                f"IngestDataset: secret is None, accepted is the file of the session's folder, or {VARIABLE}"
            )
        return replace(keys, tls=Certificates.load(self.tls)) if self.tls else keys


def tensors(batch: pa.RecordBatch, keyed: str = "") -> dict[str, Any]:
    """A batch as tensors, which share its memory where they can.

    Raises:
        UserError: a column has a type, or missing values, that no tensor has.
    """
    values_by_name: dict[str, Any] = {}
    ragged: dict[str, Ragged] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            ragged[name] = _ragged(name, column)
        else:
            values_by_name[name] = _flat(name, column)
    if not keyed:
        return values_by_name | ragged
    if not ragged:
        raise UserError(f"IngestDataset: keyed is {keyed!r}, accepted is none where no column has lists")
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = [torch.diff(jagged.offsets) for jagged in ragged.values()]
    values_by_name[keyed] = KeyedJaggedTensor(
        keys=list(ragged),
        values=torch.cat([jagged.values for jagged in ragged.values()]),
        lengths=torch.cat(lengths),
    )
    return values_by_name


def _flat(name: str, column: pa.Array) -> torch.Tensor:
    kind = column.type
    if pa.types.is_boolean(kind):
        return _flat(name, _whole(name, column).cast(pa.uint8())).view(torch.bool)
    if pa.types.is_fixed_size_list(kind):
        inner = _flat(name, _whole(name, column).flatten())
        return inner.view(len(column), kind.list_size)
    if column.null_count and pa.types.is_floating(kind):
        column = pc.fill_null(column, _nan(kind))
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise UserError(
            f"column {name} is {kind}, which is no tensor; hash it by a transform, or leave it out of columns"
        )
    if kind == pa.uint16() or kind == pa.uint32() or kind == pa.uint64():
        column = _whole(name, column).cast(pa.int64(), safe=False)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(_whole(name, column))
    return tensor


def _ragged(name: str, column: pa.Array) -> Ragged:
    if column.null_count:  # a sample that lacks a feature has no ids of it
        lengths = torch.utils.dlpack.from_dlpack(column.offsets).diff()
        lengths *= torch.utils.dlpack.from_dlpack(column.is_valid().cast(pa.int32()))
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return Ragged(_flat(name, column.flatten()), ends)
    offsets = column.offsets
    first = offsets[0].as_py()
    values = column.values.slice(first, offsets[-1].as_py() - first)
    starts = torch.utils.dlpack.from_dlpack(offsets)
    return Ragged(_flat(name, values), starts - first if first else starts)


@cache
def _nan(kind: pa.DataType) -> pa.Scalar:
    """Without `pyarrow.scalar`, which would import pandas for it."""
    return pa.Array.from_buffers(pa.float64(), 1, [None, pa.py_buffer(np.array([np.nan]))])[0].cast(kind)


def _whole(name: str, column: pa.Array) -> pa.Array:
    if column.null_count:
        raise UserError(
            f"column {name} has {column.null_count} missing values, which no tensor of {column.type} has; "
            "fill them by a transform"
        )
    return column


def _ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    if rank is None or world is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            default = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            default = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        rank, world = (default[0] if rank is None else rank), (default[1] if world is None else world)
    if not 0 <= rank < world:
        raise UserError(f"IngestDataset: rank is {rank}, accepted are 0 to world - 1, which is {world - 1}")
    return rank, world
