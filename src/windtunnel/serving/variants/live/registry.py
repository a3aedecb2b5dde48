"""From one submitted model to its variants: exported, quantised, held against the model, and measured.

A folder holds a model: ``variants.json``, and the ONNX files that it names. A variant is registered only
where its outputs are those of the model (float32: within `TOLERATED` of the largest; int8: its accuracy on
the given data within `LOST`); what is not is refused with the difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base import atomic
from windtunnel.base.errors import LessError, UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.calibration.fit import least_squares
from windtunnel.serving.variants.live.replica import Replica, session
from windtunnel.serving.variants.model import Variant

TOLERATED = 1e-4
LOST = 0.02
BATCHES = (1, 4, 8, 16)
REPEATS = 5
Arrays = Mapping[str, NDArray[Any]]


class Entry(NamedTuple):
    """A variant, and the file that a replica of it loads."""

    variant: Variant
    file: Path


@dataclass(frozen=True)
class _Kept:
    variant: Variant
    file: str


def add(
    model: Path, data: Path, home: Path, *, task: str, architecture: str
) -> tuple[list[Entry], list[str]]:
    """Register a model. ``model``: ONNX, or a module kept by ``torch.save`` (it is a program: load only what
    you trust). ``data``: an ``.npz`` with ``inputs`` (n, …) and ``labels`` (n,).
    Answers the variants, and in words which were left out.

    Raises:
        UserError: the files are not that, or the name is taken.
        LessError: what was exported does not do what the model does.
    """
    folder = home / architecture
    if not architecture.replace("-", "").replace("_", "").isalnum():
        raise UserError(
            f"variants add: the name {architecture!r} is not accepted; use letters, digits, - and _"
        )
    if (folder / "variants.json").exists():
        raise UserError(
            f"variants add: {architecture} is registered in {home} already; choose another --name"
        )
    inputs, labels = read_data(data)
    folder.mkdir(parents=True, exist_ok=True)
    full = _exported(model, inputs, folder / "fp32.onnx")
    found, left_out = [("fp32", full)], []
    right = _accuracy(full, inputs, labels)
    small = _quantised(full, inputs, folder / "int8.onnx")
    if small is None:
        left_out.append("int8: ONNX Runtime cannot quantise the model")
    elif (less := _accuracy(small, inputs, labels)) < right - LOST:
        left_out.append(f"int8: refused: accuracy {less:.2%}, and {right:.2%} in float32")
    else:
        found.append(("int8", small))
    warm = Replica(full, 1)  # the first one starts the fork server, and pays for that
    warm.loaded()
    warm.end()
    entries = list(_measured(found, inputs, labels, task, architecture))
    kept = [to_plain(_Kept(one.variant, one.file.name)) for one in entries]
    atomic.replace(folder / "variants.json", json.dumps(kept, indent=1))
    return entries, left_out


def registered(home: Path) -> list[Entry]:
    """All that is registered below ``home``.

    Raises:
        UserError: a registry's file is not one.
    """
    entries = []
    for path in sorted(home.glob("*/variants.json")):
        try:
            kept = [from_plain(_Kept, one) for one in json.loads(path.read_text())]
        except (OSError, ValueError, TypeError, KeyError) as fault:
            raise UserError(f"{path}: no registry of variants: {fault}") from fault
        entries += [Entry(one.variant, path.parent / one.file) for one in kept]
    return entries


def read_data(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs and labels of an ``.npz``."""
    try:
        with np.load(path, allow_pickle=False) as found:
            inputs, labels = found["inputs"], found["labels"]
    except (OSError, ValueError, KeyError) as fault:
        raise UserError(f"{path}: not an .npz with the arrays inputs and labels: {fault}") from fault
    if len(inputs) != len(labels) or len(inputs) < max(BATCHES) or labels.ndim != 1:
        raise UserError(
            f"{path}: inputs {inputs.shape} and labels {labels.shape} do not fit; accepted are n inputs and n"
            f" labels, {max(BATCHES)} at least"
        )
    return inputs, labels


def _exported(model: Path, inputs: NDArray[Any], file: Path) -> Path:
    if model.suffix == ".onnx":
        try:
            file.write_bytes(model.read_bytes())
            run(file, inputs[:2])
        except Exception as fault:  # the runtime's own are no family of exceptions
            raise UserError(f"{model}: ONNX Runtime cannot run it: {str(fault).splitlines()[0]}") from fault
        return file
    import torch

    try:
        module = torch.load(model, weights_only=False).eval()
    except Exception as fault:  # whatever a pickle raises
        raise UserError(f"{model}: neither ONNX nor a module kept by torch.save: {fault}") from fault
    sample = torch.from_numpy(inputs[:16])
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        wanted = module(sample).numpy()
        torch.onnx.export(
            module, (sample[:2],), str(file), dynamo=True, dynamic_shapes=shapes, input_names=["input"],
            output_names=["output"], verbose=False, external_data=False,
        )  # fmt: skip
    verify(wanted, run(file, inputs[:16]), str(model))
    return file


def verify(wanted: NDArray[Any], made: NDArray[Any], what: str) -> None:
    """Refuse what differs.

    Raises:
        LessError: it does, and by how much.
    """
    if wanted.shape != made.shape:
        raise LessError(f"{what}: refused: the export gives {made.shape}, the model {wanted.shape}")
    difference = float(np.abs(wanted - made).max())
    bound = TOLERATED * max(1.0, float(np.abs(wanted).max()))
    if not difference <= bound:
        words = f"the export differs from the model by {difference:.3g}, {bound:.3g} is tolerated"
        raise LessError(f"{what}: refused: {words}")


def _quantised(full: Path, inputs: NDArray[Any], file: Path) -> Path | None:
    """Static int8 with QDQ nodes; None where ONNX Runtime knows no way to do so."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            name = session(full, 1).get_inputs()[0].name
            self.left = iter([{name: inputs[at : at + 16]} for at in range(0, min(len(inputs), 128), 16)])

        def get_next(self) -> Any:
            return next(self.left, None)

    prepared = file.with_suffix(".prepared")
    try:
        quant_pre_process(str(full), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared), str(file), Samples(), quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
    except Exception:  # of an operator that cannot be quantised: float32 remains
        return None
    finally:
        prepared.unlink(missing_ok=True)
    return file


def run(file: Path, inputs: NDArray[Any]) -> NDArray[Any]:
    """What the file's first output is."""
    loaded = session(file, 1)
    return np.asarray(loaded.run(None, {loaded.get_inputs()[0].name: inputs})[0])


def _measured(
    found: list[tuple[str, Path]],
    inputs: NDArray[Any],
    labels: NDArray[Any],
    task: str,
    architecture: str,
) -> Iterator[Entry]:
    """Each file with one thread and two, for batches of one and of eight."""
    for precision, file in found:
        right = _accuracy(file, inputs, labels)
        for threads in (1, 2):
            load, slope, intercept = _profile(file, inputs, threads)
            memory = 3 * file.stat().st_size + (64 << 20)
            for batch in (1, 8):
                name = f"{architecture}:{precision}-t{threads}-b{batch}"
                yield Entry(Variant(
                    name, architecture, task, "onnxruntime", "cpu", precision, threads, batch, load, slope,
                    intercept, memory, right, float(threads),
                ), file)  # fmt: skip


def _accuracy(file: Path, inputs: NDArray[Any], labels: NDArray[Any]) -> float:
    return float((run(file, inputs).argmax(-1) == labels).mean())


def _profile(file: Path, inputs: NDArray[Any], threads: int) -> tuple[float, float, float]:
    """Of a replica as it will serve: seconds until it answers, of each item, and of any batch."""
    began = time.perf_counter()
    replica = Replica(file, threads)
    try:
        replica.loaded()
        replica.ask(inputs[:1])
        load = time.perf_counter() - began
        took = []
        for size in BATCHES:
            best = float("inf")
            for _ in range(REPEATS):
                began = time.perf_counter()
                replica.ask(inputs[:size])
                best = min(best, time.perf_counter() - began)
            took.append(best)
    finally:
        replica.end()
    columns = [np.array(BATCHES, float), np.ones(len(BATCHES))]
    slope, intercept = least_squares(columns, np.array(took))
    return load, slope, intercept
