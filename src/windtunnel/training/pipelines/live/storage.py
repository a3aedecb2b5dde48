"""Layers on disk: what the job falls back to when the last copy of a layer is lost.

A step is a folder ``step-00000040`` with one file a layer and, last, ``manifest.json`` with the checksum of
each: a folder without a whole manifest does not count. The folder must be one that all hosts see.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import LocalFiles, ObjectError, told
from windtunnel.store.objects.manifest import seal, unseal
from windtunnel.training.pipelines.live.layers import checksum

_KIND, _VERSION = "step of a pipeline", 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Saved:
    """What a step's manifest says: names of the layers and checksums of their files."""

    step: int
    layers: tuple[str, ...]
    checksums: tuple[str, ...]


def write_layer(folder: Path, step: int, index: int, block: Tensor) -> str:
    """Write one layer's block of ``step``; its checksum."""
    _write(LocalFiles(str(folder)), _layer(step, index), block.numpy().data)
    return checksum(block)


def write_manifest(folder: Path, step: int, names: list[str], checksums: list[str], keep: int) -> None:
    """Make ``step`` count, and remove all but the ``keep`` newest steps."""
    files = LocalFiles(str(folder))
    saved = Saved(step, tuple(names), tuple(checksums))
    _write(files, f"{_step(step)}/{_MANIFEST}", seal(_KIND, _VERSION, saved))
    with told(f"old steps in {folder}"):
        for old in steps(folder)[keep:]:
            files.remove(f"{_step(old)}/{_MANIFEST}")
            files.remove(_step(old))


def steps(folder: Path) -> list[int]:
    """Steps that have a manifest, the newest first."""
    found = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{_MANIFEST}")]
    return sorted((int(step) for step in found if step.isdecimal()), reverse=True)


def read_layer(folder: Path, step: int, index: int, names: list[str]) -> Tensor:
    """A layer's verified block.

    Raises:
        UserError: the files are missing, cut short, altered, or of another model.
    """
    files, where = LocalFiles(str(folder)), folder / _step(step) / _MANIFEST
    try:
        saved = unseal(Saved, _KIND, _VERSION, files.read(f"{_step(step)}/{_MANIFEST}"), str(where))
        block = torch.frombuffer(bytearray(files.read(_layer(step, index))), dtype=torch.uint8)
    except (OSError, ObjectError, ValueError) as error:  # torch takes no empty buffer
        raise UserError(f"{where.parent}: layer {names[index]} cannot be read: {error}") from None
    if saved.layers != tuple(names):
        raise UserError(f"{where}: layers {list(saved.layers)}; the model has {names}")
    found, expected = checksum(block), saved.checksums[index]
    if found != expected:
        raise UserError(f"{folder / _layer(step, index)}: checksum {found}; the manifest says {expected}")
    return block


def _step(step: int) -> str:
    return f"step-{step:08d}"


def _layer(step: int, index: int) -> str:
    return f"{_step(step)}/layer-{index:04d}"


def _write(files: LocalFiles, name: str, data: bytes | memoryview) -> None:
    with told("a step cannot be saved"):
        files.write(name, data)
        files.settle()
