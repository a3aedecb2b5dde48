"""What a part of a micro-batch did, in names that belong to no process, to be written down once more.

A part (the forward, the loss, the backward of a micro-batch) takes numbers for the blocks, event records
and work handles that it makes. In a template they are counted from the first that the part took, and those
of an earlier part of the same micro-batch from the first that that one took; rows of tables are replaced by
what they say. So two parts did the same exactly when their templates are equal, also in different
processes, and a template gives the events of any other micro-batch, to the byte, as soon as it has taken
numbers."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.emulate.graph import COMM_STREAM, EventKind
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.observe import Observer

Events = np.ndarray[Any, np.dtype[Any]]
Longs = NDArray[np.int64]
Where = tuple[str, NDArray[np.bool_]]

SHIFT = 24
"""In a template a number is the part that took it above so many bits, and how many that part took before
it; 0 is one that no part of this micro-batch took."""
INPUT = 5
"""From here on the micro-batch's buffers for what comes from other stages stand in the place of a part."""


class RecordedPart(IntEnum):
    """Of a micro-batch. ``WEIGHTS``: the backward of weights, where that of inputs is one by itself."""

    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    WEIGHTS = 4


@dataclass(frozen=True)
class NumberRange:
    """The first of the numbers that a part took of blocks, event records and work handles, and how many."""

    first: tuple[int, ...]
    count: tuple[int, ...]


@dataclass
class TemplateNames:
    """What rows and streams of this process are called elsewhere: a process group by its place among those
    of the rank, and a layer by its place among those of the stage (``layers``: their numbers, as they ran
    first)."""

    observer: Observer
    layers: list[str] = field(default_factory=list)

    def text(self, table: int, number: int) -> str:
        """Of a row of the operators (0), collectives (1), streams (2), scopes (3) or call sites (4)."""
        observer = self.observer
        if table > 2:
            text = (observer.scopes if table == 3 else observer.call_sites)[number]
            return re.sub(r"(?<![^. ])\d+(?![^.])", self._layer, text) if self._is_path(table, text) else text
        if table == 2 and number < COMM_STREAM:
            return str(number)
        row = observer.native.wt_row(table, number).decode()
        if table == 2:
            row = re.sub(r"^([^|]*)", r'"g":"\1"', row)
        groups = list(observer.world.names)
        return row if table == 0 else re.sub(r'"g":"(.*?)"', lambda at: f'"g":"{groups.index(at[1])}"', row)

    def number(self, table: int, text: str) -> int:
        """The inverse of `text`; what this process does not have yet is added."""
        observer = self.observer
        if table > 2:
            if self._is_path(table, text):
                text = re.sub(r"<(\d+)>", lambda at: self.layers[int(at[1])], text)
            return observer.scope_row(text) if table == 3 else observer.site_row(text)
        if text.isdigit():
            return int(text)
        groups = list(observer.world.names)
        if table:
            text = re.sub(r'"g":"(\d+)"', lambda at: f'"g":"{groups[int(at[1])]}"', text)
        text = re.sub(r'^"g":"(.*?)"', r"\1", text) if table == 2 else text
        return int(observer.native.wt_row_of(table, text.encode()))

    def _is_path(self, table: int, text: str) -> bool:
        return table == 3 or text.startswith("backward")

    def _layer(self, at: re.Match[str]) -> str:
        if at[0] not in self.layers:
            self.layers.append(at[0])
        return f"<{self.layers.index(at[0])}>"


def _named(events: Events) -> list[Where]:
    """Where the rows of the tables of `TemplateNames` stand."""
    kind, all_ = events["kind"], np.ones(len(events), np.bool_)
    operators, collectives, sites = (kind == k for k in (EventKind.OP, EventKind.COLLECTIVE, EventKind.CALL))
    return [("ref", operators), ("ref", collectives), ("stream", all_), ("scope", all_), ("ref", sites)]


def _numbered(events: Events) -> list[Where]:
    """Where blocks, event records and work handles stand."""
    kind, ref = events["kind"], events["ref"]
    synced = kind == EventKind.SYNC
    blocks = np.isin(kind, (EventKind.ALLOC, EventKind.FREE, EventKind.RECORD_STREAM))
    records = np.isin(kind, (EventKind.RECORD, EventKind.WAIT)) | (synced & (ref >= 0))
    works = np.isin(kind, (EventKind.COLLECTIVE, EventKind.WORK_WAIT)) | (synced & (ref == -3))
    return [("ref", blocks), ("ref", records), ("value", works)]


def portable(numbers: Any, part_numbers: dict[int, NumberRange], which: int) -> Longs:
    """Numbers of blocks (0), event records (1) or work handles (2) as in a template."""
    numbers = np.asarray(numbers, np.int64)
    ported = np.zeros(len(numbers), np.int64)
    for part, numbers_of in part_numbers.items():
        first, count = numbers_of.first[which], numbers_of.count[which]
        inside = (numbers >= first) & (numbers < first + count)
        ported[inside] = (part << SHIFT) + numbers[inside] - first
    return ported


def own(numbers: Any, part_numbers: dict[int, NumberRange], which: int) -> Longs:
    """The inverse of `portable`."""
    numbers = np.asarray(numbers, np.int64)
    first = np.zeros(max(part_numbers) + 1, np.int64)
    for part, numbers_of in part_numbers.items():
        first[part] = numbers_of.first[which]
    return first[numbers >> SHIFT] + (numbers & ((1 << SHIFT) - 1))


@dataclass
class ChunkTemplate:
    """What a part did. ``events`` refer to ``names``, a list for each table. ``returned``: what it gave back,
    in words; ``blocks``: of these tensors. ``communicated``: blocks of its collectives; ``categories``: of
    blocks that were marked. ``modules``: entered in it."""

    part: RecordedPart
    count: tuple[int, ...]
    events: Events
    names: list[list[str]]
    returned: str
    blocks: list[int]
    communicated: Longs
    categories: dict[int, int]
    modules: int

    def digest(self, foreign_blocks: Sequence[int] = ()) -> str:
        """Equal for two parts exactly when they did the same. Left out are frees of what was made before the
        micro-batch, and of ``foreign_blocks``, which somebody else may have held."""
        freed = (self.events["kind"] == EventKind.FREE) & np.isin(self.events["ref"], [0, *foreign_blocks])
        content = (self.count, self.names, self.returned, self.blocks, self.categories)
        data = self.events[~freed].tobytes() + self.communicated.tobytes() + repr(content).encode()
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    @property
    def is_closed(self) -> bool:
        """Whether it depends on nothing but its micro-batch: what was made before it is neither used nor
        freed, and the host does not look at the device."""
        foreign = any((self.events[column][where] == 0).any() for column, where in _numbered(self.events))
        flows = self.events["value"][self.events["kind"] == EventKind.OP].any()
        waits = (self.events["kind"] == EventKind.SYNC).any()
        freed = (self.events["ref"][self.events["kind"] == EventKind.FREE] >= INPUT << SHIFT).any()
        return not (foreign or flows or waits or freed or (self.communicated == 0).any() or 0 in self.blocks)


def template(
    part: RecordedPart, events: Events, names: TemplateNames, part_numbers: dict[int, NumberRange],
    returned: str, blocks: list[int], communicated: list[int], categories: dict[int, int], modules: int,
) -> ChunkTemplate:  # fmt: skip
    """The template of a part, from its events and blocks as they are in this process."""
    for which, (column, where) in enumerate(_numbered(events)):
        events[column][where] = portable(events[column][where], part_numbers, which)
    texts = []
    for table, (column, where) in enumerate(_named(events)):
        values, first, inverse = np.unique(events[column][where], return_index=True, return_inverse=True)
        events[column][where] = np.argsort(np.argsort(first))[inverse]
        texts.append([names.text(table, number) for number in values[np.argsort(first)].tolist()])
    marked = portable(list(categories), part_numbers, 0).tolist()
    return ChunkTemplate(
        part, part_numbers[part].count, events, texts, returned, portable(blocks, part_numbers, 0).tolist(),
        portable(communicated, part_numbers, 0), dict(zip(marked, categories.values(), strict=True)), modules,
    )  # fmt: skip


def localised(chunk_template: ChunkTemplate, names: TemplateNames) -> Events:
    """The events of a template that refer to the tables of this process."""
    events = chunk_template.events.copy()
    for table, (column, where) in enumerate(_named(events)):
        rows = np.array([names.number(table, text) for text in chunk_template.names[table]], np.int64)
        events[column][where] = rows[events[column][where]] if len(rows) else 0
    return events


def write(
    chunk_template: ChunkTemplate, events: Events, part_numbers: dict[int, NumberRange], native: ctypes.CDLL,
    stands: dict[int, Any], drop: Callable[[int, Any], None],
) -> None:  # fmt: skip
    """Write the events of a template (as `localised`) down for another micro-batch, which takes the
    numbers. Instead of the free of a block that a tensor ``stands`` for, ``drop(block, event)`` is called
    in its place."""
    part_numbers[chunk_template.part] = NumberRange(
        tuple(int(native.wt_take(i, n)) for i, n in enumerate(chunk_template.count)), chunk_template.count
    )
    events = events.copy()
    for which, (column, where) in enumerate(_numbered(events)):
        events[column][where] = own(events[column][where], part_numbers, which)
    stand_in_frees = (events["kind"] == EventKind.FREE) & np.isin(events["ref"], list(stands))
    begin = 0
    for row in [*np.flatnonzero(stand_in_frees).tolist(), len(events)]:
        piece = np.ascontiguousarray(events[begin:row])
        native.wt_append(piece.ctypes.data, len(piece))
        if row < len(events):
            drop(int(events["ref"][row]), events[row])
        begin = row + 1
    communicated = own(chunk_template.communicated, part_numbers, 0)
    native.wt_communicated(communicated.ctypes.data, len(communicated))


unlike = itertools.count()
"""Numbers for what is like nothing else."""


def signature(inputs: Any) -> list[Any]:
    """What a forward may do depends on this of its inputs; those on the host are like nothing else."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            return (leaf.shape, local.shape, local.stride(), leaf.dtype) if leaf.is_cuda else next(unlike)
        return repr(leaf) if leaf is None or isinstance(leaf, bool | int | float | str) else id(leaf)

    return [of(leaf) for leaf in pytree.tree_leaves(inputs)]


def keeps_parameters(module: torch.nn.Module) -> bool:
    """Whether a micro-batch leaves parameters and gradients as it found them, and no hook of the user's is
    there."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
            return False
        if isinstance(part, FSDPModule):
            groups = part._get_fsdp_state()._fsdp_param_groups
            if any(group.post_forward_mesh_info is not None for group in groups):
                return False
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        for hook in itertools.chain(*(each.values() for each in hooks)):
            code = getattr(getattr(hook, "func", hook), "__code__", None)
            if code is not None and failure.is_own(code.co_filename):
                return False
    return True


def host_state(module: torch.nn.Module) -> Any:
    """What a program may go by that counts micro-batches, or draws what each does."""
    plain_state = [
        (name, value if isinstance(value, int | float | str) else len(value))
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str | list | dict)
    ]
    return (
        plain_state,
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["pos"],
        torch.get_rng_state().tolist(),
    )
