"""One table as one file, whatever tiers, order or ranks it is split over: rows in the order of their ids.

The file is a safetensors file (``weight`` [rows, dim] and ``state.NAME`` [rows, width], float32), which that
library reads too. Its metadata say which table and optimizer it is of, and hold a CRC-32 of every `CHUNK`
rows of each tensor. It is streamed, and gets its name when it is whole and on the disk.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError

CHUNK = 1 << 14
"""Rows of one checksum."""


@dataclass(frozen=True)
class TableFileHeader:
    """What a file is of. ``optimizer``: the name of its class, "" of none; ``widths``: floats a row of each
    state."""

    table: str
    rows: int
    dim: int
    optimizer: str
    steps: int
    widths: dict[str, int]

    @property
    def tensors(self) -> dict[str, int]:
        """Of each tensor its width."""
        return {"weight": self.dim, **{f"state.{name}": width for name, width in self.widths.items()}}


def spans(rows: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """First and last (not included) of every ``size`` rows."""
    return ((first, min(rows, first + size)) for first in range(0, rows, size))


def write(path: str | Path, saved: TableFileHeader, chunks: Iterable[Tensor]) -> None:
    """``chunks``: records [n, dim and widths] of the ids of `spans`, in turn.

    Raises:
        HostError: it cannot be written; what had the name before is as it was.
    """
    path = Path(path)
    begin = len(_header(saved, {name: ["0" * 8] * -(-saved.rows // CHUNK) for name in saved.tensors}))
    sums: dict[str, list[str]] = {name: [] for name in saved.tensors}
    try:
        with atomic.replacing(path) as part, open(part, "wb", buffering=0) as file:
            for (first, _), records in zip(spans(saved.rows), chunks, strict=True):
                at, columns = begin, 0
                for name, width in saved.tensors.items():
                    data = records[:, columns : columns + width].contiguous().numpy().tobytes()
                    sums[name].append(f"{zlib.crc32(data):08x}")
                    file.seek(at + 4 * first * width)
                    atomic.write_all(file.fileno(), data)
                    at, columns = at + 4 * saved.rows * width, columns + width
            file.seek(0)
            atomic.write_all(file.fileno(), _header(saved, sums))
            os.fsync(file.fileno())
        atomic.sync_folder(path.parent)
    except OSError as error:
        raise HostError(f"checkpoint {path}: cannot be written ({error.strerror})") from None


def read(
    path: str | Path, wanted: TableFileHeader
) -> tuple[TableFileHeader, Iterator[tuple[Tensor, Tensor]]]:
    """What is in the file, and ids and records of every chunk, once all checksums have been found right.

    ``wanted``: the table that it is for; without an optimizer it takes the weights alone.

    Raises:
        UserError: there is none, it is damaged or cut short, or it is of another table or optimizer.
    """
    path = Path(path)
    saved, sums, begin = _read_header(path)
    for field in ("table", "rows", "dim", *(("optimizer", "widths") if wanted.optimizer else ())):
        if getattr(saved, field) != getattr(wanted, field):
            raise UserError(
                f"checkpoint {path}: {field} is {getattr(saved, field)!r}; accepted is"
                f" {getattr(wanted, field)!r}"
            )
    names = saved.tensors if wanted.optimizer else {"weight": saved.dim}

    def pieces(names: dict[str, int]) -> Iterator[tuple[Tensor, Tensor]]:
        with open(path, "rb", buffering=0) as file:
            for number, (first, last) in enumerate(spans(saved.rows)):
                tensors, at = [], begin
                for name, width in saved.tensors.items():
                    if name in names:
                        data = bytearray(
                            os.pread(file.fileno(), 4 * width * (last - first), at + 4 * width * first)
                        )
                        if f"{zlib.crc32(data):08x}" != sums[name][number]:
                            raise UserError(
                                f"checkpoint {path}: {name} of ids {first} to {last - 1} is damaged;"
                                " accepted is a whole file"
                            )
                        tensors.append(torch.frombuffer(data, dtype=torch.float32).view(-1, width))
                    at += 4 * width * saved.rows
                yield torch.arange(first, last), torch.cat(tensors, 1)

    for _ in pieces(saved.tensors):
        pass
    return saved, pieces(names)


def _header(saved: TableFileHeader, sums: dict[str, list[str]]) -> bytes:
    facts: dict[str, Any] = {
        "table": saved.table, "optimizer": saved.optimizer, "steps": f"{saved.steps:020d}",
        "crc32": json.dumps(sums),
    }  # fmt: skip
    facts["check"] = f"{zlib.crc32(json.dumps([facts, saved.tensors]).encode()):08x}"
    fields: dict[str, Any] = {"__metadata__": facts}
    at = 0
    for name, width in saved.tensors.items():
        size = 4 * width * saved.rows
        fields[name] = {"dtype": "F32", "shape": [saved.rows, width], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path) -> tuple[TableFileHeader, dict[str, list[str]], int]:
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            fields = json.loads(file.read(min(size, path.stat().st_size)))
        facts = fields.pop("__metadata__")
        widths = {name: int(field["shape"][1]) for name, field in fields.items()}
        rows, check = int(fields["weight"]["shape"][0]), facts.pop("check")
        right = f"{zlib.crc32(json.dumps([facts, widths]).encode()):08x}" == check
        sums = json.loads(facts["crc32"])
        saved = TableFileHeader(
            facts["table"], rows, widths.pop("weight"), facts["optimizer"], int(facts["steps"]),
            {name.removeprefix("state."): width for name, width in widths.items()},
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"checkpoint {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        right = False
    if not right:
        raise UserError(
            f"checkpoint {path}: its header is damaged, or it is no file of a table that was saved"
        )
    if len(sums["weight"]) != -(-saved.rows // CHUNK):
        raise UserError(f"checkpoint {path}: it has checksums of another count of rows than {saved.rows}")
    return saved, sums, 8 + size
