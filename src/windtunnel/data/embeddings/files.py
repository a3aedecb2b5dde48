"""Files of embeddings: plans, and statistics of tables: a folder of one sealed file and an order for each.

``statistics.json`` is a manifest of `store.objects` (kind, version, checksum) with the tables and how they
were come by; ``orders/0000.npy`` and so on are the tables' orders in NumPy's own format, each with its
checksum in the manifest. A folder is whole or not there: it is written beside its final name and renamed at
the end. A plan is a sealed file, with what the tables are that it is for.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.data.embeddings.model import EmbeddingTable, Order, checked, id_type
from windtunnel.data.embeddings.policy import TablePlacement
from windtunnel.store.objects import ObjectError
from windtunnel.store.objects.manifest import seal, unseal

KIND, VERSION = "embedding statistics", 1
MANIFEST, PLAN = "statistics.json", "plan.json"
PLAN_KIND, PLAN_VERSION = "embedding plan", 1
T = TypeVar("T")


@dataclass(frozen=True)
class _OrderFile:
    """One order file: its name in the folder, and the BLAKE2b of its bytes."""

    file: str
    check: str


@dataclass(frozen=True)
class _Content:
    tables: tuple[EmbeddingTable, ...]
    orders: dict[str, _OrderFile]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Statistics:
    """``tables``; ``facts``: what else is known of them, by the name of the table."""

    folder: Path
    tables: tuple[EmbeddingTable, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    _orders: Mapping[str, _OrderFile] = field(default_factory=dict)

    def order(self, name: str) -> Order:
        """Which id has which rank in the table ``name``, mapped from its file, which is read once whole: its
        checksum is held against the manifest's.

        Raises:
            UserError: the table is not here or has no order, or its file is damaged.
        """
        if name not in self._orders:
            raise UserError(f"{self.folder}: there is no order of a table {name}, {_accepted(self._orders)}")
        entry, rows = self._orders[name], next(table.rows for table in self.tables if table.name == name)
        path = self.folder / entry.file
        try:
            ranking = np.load(path, mmap_mode="r", allow_pickle=False)
            check = _digest(path)
        except (OSError, ValueError, EOFError) as fault:
            raise UserError(f"{path}: the order of table {name} is damaged or missing ({fault})") from None
        if ranking.shape != (rows,) or ranking.dtype != id_type(rows):
            raise UserError(
                f"{path}: the order of table {name} is {ranking.dtype} of shape {ranking.shape},"
                f" accepted is {np.dtype(id_type(rows))} of shape ({rows},)"
            )
        if check != entry.check:
            raise UserError(f"{path}: the order of table {name} is damaged: it does not match its checksum")
        return ranking


def read_statistics(folder: Path) -> Statistics:
    """What `write_statistics` wrote.

    Raises:
        UserError: it is not there, damaged, of another version, or no such folder.
    """
    path = folder / MANIFEST
    content = _unsealed(_Content, KIND, VERSION, path, "a folder that 'windtunnel embeddings profile' wrote")
    checked(content.tables, str(path))
    return Statistics(folder, content.tables, content.facts, content.orders)


def write_statistics(
    folder: Path,
    tables: tuple[EmbeddingTable, ...],
    orders: Mapping[str, Order | Callable[[Path], None]],
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Make ``folder`` with the statistics of ``tables``. ``orders``: by the table's name, an array, or a
    function that writes the .npy file of one that would not fit memory.

    Raises:
        UserError: it is there already, or cannot be made.
        HostError: it cannot be written, and is not there.
    """
    checked(tables, str(folder))
    with new_folder(folder) as part:
        (part / "orders").mkdir()
        entries = {}
        for number, (name, order) in enumerate(orders.items()):
            file = f"orders/{number:04d}.npy"
            if callable(order):
                order(part / file)
            else:
                np.save(part / file, order, allow_pickle=False)
            entries[name] = _OrderFile(file, _digest(part / file))
        content = _Content(tables, entries, dict(facts or {}))
        (part / MANIFEST).write_bytes(seal(KIND, VERSION, content))


def fresh(folder: Path) -> None:
    """``folder`` can be made anew.

    Raises:
        UserError: it is there already.
    """
    if folder.exists():
        raise UserError(f"{folder}: is there already, accepted is the name of a new folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` to write into, which becomes it at the end, and goes if anything is raised.

    Raises:
        UserError: ``folder`` is there already, or cannot be made.
        HostError: it cannot be filled.
    """
    fresh(folder)
    part = atomic.temporary(folder)
    try:
        part.mkdir(parents=True)
    except OSError as fault:
        raise UserError(f"{folder}: cannot be made ({fault.strerror}), accepted is a new folder") from fault
    try:
        yield part
        part.rename(folder)
    except OSError as fault:
        shutil.rmtree(part, ignore_errors=True)
        raise HostError(f"{folder} cannot be written: {fault.strerror or fault}") from fault
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Shape:
    """What a plan must know of a table."""

    name: str
    rows: int
    dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.rows} x {self.dim} {self.dtype}"


@dataclass(frozen=True)
class _Plan:
    tables: tuple[_Shape, ...]
    plan: TablePlacement


def _shapes(tables: Sequence[EmbeddingTable]) -> tuple[_Shape, ...]:
    return tuple(_Shape(table.name, table.rows, table.dim, table.dtype) for table in tables)


def write_plan(path: Path, tables: Sequence[EmbeddingTable], plan: TablePlacement) -> None:
    """As one sealed file, whole or not at all.

    Raises:
        HostError: it cannot be written.
    """
    try:
        atomic.replace(path, seal(PLAN_KIND, PLAN_VERSION, _Plan(_shapes(tables), plan)))
    except OSError as fault:
        raise HostError(f"{path} cannot be written: {fault.strerror}") from fault


def read_plan(path: Path, tables: Sequence[EmbeddingTable]) -> TablePlacement:
    """The plan that `write_plan` wrote for ``tables``, which may come in another order.

    Raises:
        UserError: the file is not there, damaged, no plan, or one for other tables.
    """
    content = _unsealed(_Plan, PLAN_KIND, PLAN_VERSION, path, "what 'windtunnel embeddings plan' wrote")
    planned, here = ({shape.name: shape for shape in some} for some in (content.tables, _shapes(tables)))
    for name in (*here, *planned):
        if planned.get(name) != here.get(name):
            expected, actual = (some.get(name, "no table") for some in (planned, here))
            raise UserError(
                f"plan {path} is for other tables: it has {name} as {expected}, here it is {actual}"
            )
    return content.plan


def _unsealed(record: type[T], kind: str, version: int, path: Path, accepted: str) -> T:
    try:
        return unseal(record, kind, version, path.read_bytes(), str(path))
    except OSError as fault:
        raise UserError(f"{path}: cannot be read ({fault.strerror}), accepted is {accepted}") from None
    except ObjectError as fault:
        raise UserError(f"{fault}; accepted is {accepted}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _accepted(orders: Mapping[str, Any]) -> str:
    return f"accepted are {', '.join(orders)}" if orders else "the folder has none"
