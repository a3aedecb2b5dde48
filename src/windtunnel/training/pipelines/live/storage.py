"""Layers on disk: what the job falls back to when the last copy of a layer is lost.

A step is a folder ``step-00000040`` with one file a layer and, last, ``manifest.json`` with the checksum of
each: a folder without a whole manifest does not count. Each file is written under another name, synced and
renamed. The folder must be one that all machines see.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.live.layers import checksum

_VERSION = 1
_MANIFEST = "manifest.json"


def write_layer(folder: Path, step: int, index: int, block: Tensor) -> str:
    """Write one layer's block of ``step``; its checksum."""
    _write(_step_folder(folder, step) / _file(index), block.numpy().data)
    return checksum(block)


def write_manifest(folder: Path, step: int, names: list[str], checksums: list[str], keep: int) -> None:
    """Make ``step`` count, and remove all but the ``keep`` newest steps."""
    text = json.dumps({"version": _VERSION, "step": step, "layers": names, "checksums": checksums})
    _write(_step_folder(folder, step) / _MANIFEST, memoryview(text.encode()))
    for old in steps(folder)[keep:]:
        (_step_folder(folder, old) / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(_step_folder(folder, old), ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """Steps that have a manifest, the newest first."""
    found = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{_MANIFEST}")]
    return sorted((int(step) for step in found if step.isdecimal()), reverse=True)


def read_layer(folder: Path, step: int, index: int, names: list[str]) -> Tensor:
    """A layer's verified block.

    Raises:
        UserError: the files are missing, cut short, altered, or of another model.
    """
    where = _step_folder(folder, step)
    try:
        manifest = json.loads((where / _MANIFEST).read_text())
        if manifest["version"] != _VERSION:
            raise UserError(f"{where / _MANIFEST}: version {manifest['version']}; {_VERSION} is accepted")
        if manifest["layers"] != names:
            raise UserError(f"{where / _MANIFEST}: layers {manifest['layers']}; the model has {names}")
        block = torch.frombuffer(bytearray((where / _file(index)).read_bytes()), dtype=torch.uint8)
        expected = manifest["checksums"][index]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: layer {names[index]} cannot be read: {error}") from None
    if checksum(block) != expected:
        raise UserError(f"{where / _file(index)}: checksum {checksum(block)}; the manifest says {expected}")
    return block


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _file(index: int) -> str:
    return f"layer-{index:04d}"


def _write(path: Path, data: memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
