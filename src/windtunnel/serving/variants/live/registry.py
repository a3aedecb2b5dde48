"""From one submitted model to its variants: exported, quantised, held against the model, and measured.

A folder holds a model: ``variants.json``, and the files that it names. A variant is registered only where its
outputs are those of the model (float32: within `TOLERATED` of the largest; int8: its accuracy on the given
data within `LOST`); what is not is refused with the difference. Requests are run together only where a batch
gave what its items gave one by one.
"""

from __future__ import annotations

import inspect
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from windtunnel.base import atomic
from windtunnel.base.errors import LessError, UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.calibration.fit import least_squares
from windtunnel.serving.variants.live.replica import (
    COMPILED,
    Died,
    Failed,
    Replica,
    arrays,
    preload,
    program,
    session,
)
from windtunnel.serving.variants.live.tensors import DATATYPES, Arrays, Outputs, Signature, TensorSpec, parted
from windtunnel.serving.variants.model import Variant

TOLERATED = 1e-4
LOST = 0.02
BATCHES = (1, 4, 8, 16)
THREADS = (1, 2)
REPEATS = 5
ONNX = {
    "tensor(float)": "FP32", "tensor(double)": "FP64", "tensor(float16)": "FP16", "tensor(string)": "BYTES",
    **{f"tensor({datatype.lower()})": datatype for datatype in DATATYPES if datatype[0] in "UIB"},
}  # fmt: skip
"""ONNX Runtime's names of types, and the protocol's."""


class VariantFile(NamedTuple):
    """A variant, the file that a replica of it loads, and what it takes and gives."""

    variant: Variant
    file: Path
    signature: Signature


@dataclass(frozen=True)
class _VariantRecord:
    variant: Variant
    file: str
    signature: Signature


class _VariantSource(NamedTuple):
    framework: str
    precision: str
    file: Path
    accuracy: float = 0.0


class Examples(NamedTuple):
    """What a model takes and gives, and n items of its inputs."""

    signature: Signature
    inputs: Arrays

    def at(self, first: int, count: int) -> Arrays:
        """Items as the model takes them."""
        if self.signature.batched:
            return {name: values[first : first + count] for name, values in self.inputs.items()}
        return {name: np.asarray(values[first], values.dtype) for name, values in self.inputs.items()}

    def batch(self, most: int) -> int:
        return most if self.signature.batched else 1


def add(
    model: Path, data: Path, home: Path, *, task: str, architecture: str, compiled: bool = True
) -> tuple[list[VariantFile], list[str]]:
    """Register a model. ``model``: ONNX, or a module kept by ``torch.save`` (it is a program: load only what
    you trust). ``data``: an ``.npz`` with an array (n, …) for each input (``inputs``, if there is one only)
    and ``labels`` (n, …) of the first output. ``compiled``: by torch's Inductor, too.
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
            f"variants add: {architecture} is registered in {home} already; choose another `architecture`"
        )
    arrays, labels = read_data(data)
    folder.mkdir(parents=True, exist_ok=True)
    left_out: list[str] = []
    if model.suffix == ".onnx":
        programs, examples = _submitted(model, folder, data, arrays)
        left_out.append("torch: the model was submitted as ONNX")
    else:
        programs, examples = _exported(model, folder, arrays, compiled, left_out)
    own, names = _form(examples.signature), {task, architecture}
    for other in registered(home):  # whatever shares a name gets the same requests
        shared = names & {other.variant.task, other.variant.architecture}
        if shared and _form(other.signature) != own:
            raise UserError(
                f"variants add: {architecture} takes {own}, and other models of {min(shared)} take"
                f" {_form(other.signature)}; choose another `task` or name"
            )
    programs = [
        exported._replace(accuracy=accuracy(exported.file, examples, labels)) for exported in programs
    ]
    full, small = programs[0], folder / "int8.onnx"
    if full.precision != "fp32":
        left_out.append(f"int8: the model is {full.precision}, not float32 of ONNX")
    elif not _quantised(full.file, examples, small):
        left_out.append("int8: ONNX Runtime cannot quantise the model")
    elif (less := accuracy(small, examples, labels)) < full.accuracy - LOST:
        left_out.append(f"int8: refused: accuracy {less:.2%}, and {full.accuracy:.2%} in float32")
    else:
        programs.append(_VariantSource("onnxruntime", "int8", small, less))
    if not examples.signature.batched:
        left_out.append("batches: an item of the model is not a row of all its tensors, or not by itself")
    preload(*(exported.framework for exported in programs))
    _profile(full.file, examples, 1)  # the first one starts the fork server, and pays for that
    entries = list(_measured(programs, examples, task, architecture))
    records = [to_plain(_VariantRecord(entry.variant, entry.file.name, entry.signature)) for entry in entries]
    atomic.replace(folder / "variants.json", json.dumps(records, indent=1))
    return entries, left_out


def registered(home: Path) -> list[VariantFile]:
    """All that is registered below ``home``.

    Raises:
        UserError: a registry's file is not one.
    """
    entries = []
    for path in sorted(home.glob("*/variants.json")):
        try:
            records = [from_plain(_VariantRecord, load) for load in json.loads(path.read_text())]
        except (OSError, ValueError, TypeError, KeyError) as fault:
            raise UserError(f"{path}: no registry of variants: {fault}") from fault
        entries += [
            VariantFile(record.variant, path.parent / record.file, record.signature) for record in records
        ]
    return entries


def read_data(path: Path) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Inputs by name, and labels, of an ``.npz``."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            inputs = {name: archive[name] for name in archive.files if name != "labels"}
            labels = archive["labels"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise UserError(f"{path}: not an .npz with inputs and labels: {fault}") from fault
    lengths = {array.shape[:1] for array in (*inputs.values(), labels)}
    if not inputs or len(lengths) > 1 or min(lengths) < (max(BATCHES),):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in (*inputs.items(), ("labels", labels)))
        raise UserError(
            f"{path}: {shapes} do not fit; accepted are n items of each input and n labels, {max(BATCHES)} at"
            " least"
        )
    words = {name: array.astype(object) for name, array in inputs.items() if array.dtype.kind == "U"}
    return {**inputs, **words}, labels


def _submitted(
    model: Path, folder: Path, data: Path, arrays: Arrays
) -> tuple[list[_VariantSource], Examples]:
    """ONNX as it is, with what it kept in other files."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        read = onnx.load(model)
        precision = _precision(read)
        file = folder / f"{precision}.onnx"
        onnx.save(read, file, save_as_external_data=read.ByteSize() > 1 << 30, location=f"{precision}.data")
        loaded = session(file, 0)
    except (DecodeError, Exception) as fault:  # the runtime's own are no family of exceptions
        raise UserError(f"{model}: ONNX Runtime cannot run it: {_line(fault)}") from fault
    tensors = []
    for kind, some in (("input", loaded.get_inputs()), ("output", loaded.get_outputs())):
        for port in some:
            if port.type not in ONNX or port.shape is None:
                defect = f"of type {port.type}" if port.type not in ONNX else "without a rank"
                raise UserError(f"{model}: {kind} {port.name} {defect} is not accepted; use tensors of"
                                f" {', '.join(DATATYPES)} with their axes")  # fmt: skip
            shape = tuple(size if isinstance(size, int) else -1 for size in port.shape)
            tensors.append(TensorSpec(port.name, ONNX[port.type], shape))
    count = len(loaded.get_inputs())
    ports, outputs = tuple(tensors[:count]), tuple(tensors[count:])
    if set(arrays) == {"inputs"} and count == 1:
        arrays = {ports[0].name: arrays["inputs"]}
    if set(arrays) != {tensor.name for tensor in ports}:
        raise UserError(f"{data}: inputs {', '.join(arrays)} are not accepted; use {_in_words(ports)}")
    free = all(tensor.shape[:1] == (-1,) for tensor in ports)
    for port in ports:
        has, sizes = arrays[port.name], port.shape[1:] if free else port.shape
        fits = has.ndim == len(sizes) + 1 and all(
            size in (-1, mine) for size, mine in zip(sizes, has.shape[1:], strict=True)
        )
        if has.dtype != DATATYPES[port.datatype] or not fits:
            raise UserError(
                f"{data}: {port.name} of {has.dtype} {has.shape} is not accepted; use n items of"
                f" {_in_words([port])}"
            )
    examples = Examples(
        Signature(ports, outputs, free), {tensor.name: arrays[tensor.name] for tensor in ports}
    )
    examples = _batched(examples, file)
    try:
        program(file, 0)(examples.at(0, 1))
    except Exception as fault:
        raise UserError(f"{model}: ONNX Runtime cannot run it on {data}: {_line(fault)}") from fault
    return [_VariantSource("onnxruntime", precision, file)], examples


def _precision(model: Any) -> str:
    """Of most of the weights."""
    from onnx import TensorProto

    sizes = Counter({"FLOAT": 0})
    for tensor in model.graph.initializer:
        sizes[TensorProto.DataType.Name(tensor.data_type)] += tensor.ByteSize()
    most = max(sizes, key=lambda name: sizes[name])
    return "fp32" if most == "FLOAT" else most.lower()


def _batched(examples: Examples, file: Path) -> Examples:
    """As they are where a batch gives what its items give one by one; or those of a model that is asked for
    one item at a time."""
    if not examples.signature.batched:
        return examples
    run = program(file, 0)
    try:
        for at, whole in enumerate(parted(run(examples.at(0, 4)), [1] * 4)):
            verify(run(examples.at(at, 1)), whole, "")
    except Exception:  # of a runtime that cannot, or a difference
        inputs = {name: array[:, None] for name, array in examples.inputs.items()}
        return Examples(replace(examples.signature, batched=False), inputs)
    return examples


def _exported(
    model: Path, folder: Path, data_arrays: Arrays, compiled: bool, left_out: list[str]
) -> tuple[list[_VariantSource], Examples]:
    """A module, as a program of torch, compiled, and as ONNX: each held against it."""
    import torch

    try:
        module = torch.load(model, weights_only=False).eval()
    except Exception as fault:  # whatever a pickle raises
        raise UserError(f"{model}: neither ONNX nor a module kept by torch.save: {_line(fault)}") from fault
    takes = ["inputs"] if set(data_arrays) == {"inputs"} else [*inspect.signature(module.forward).parameters]
    if not set(data_arrays) <= set(takes):
        raise UserError(f"{model}: inputs {', '.join(data_arrays)} are not accepted; use {', '.join(takes)}")
    inputs = {
        name if len(data_arrays) > 1 else "input": data_arrays[name] for name in takes if name in data_arrays
    }
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    try:
        sample = tuple(torch.from_numpy(array[:16]) for array in inputs.values())
        with torch.no_grad():
            expected = arrays(module(*sample))
            traced = torch.export.export(
                module, tuple(tensor[:2] for tensor in sample), dynamic_shapes=shapes
            )
    except Exception as fault:  # of any kind, by the model's code
        raise UserError(f"{model}: torch.export cannot export it: {_line(fault)}") from fault
    names = ["output"] if len(expected) == 1 else [f"output_{at}" for at in range(len(expected))]
    signature = Signature(
        tuple(_free(name, array) for name, array in inputs.items()),
        tuple(_free(name, array) for name, array in zip(names, expected, strict=True)), True,
    )  # fmt: skip
    exported = []
    try:
        torch.onnx.export(
            traced, (), str(folder / "fp32.onnx"), dynamo=True, input_names=list(inputs), output_names=names,
            verbose=False, external_data=False,
        )  # fmt: skip
        exported.append(_VariantSource("onnxruntime", "fp32", folder / "fp32.onnx"))
    except Exception as fault:
        left_out.append(f"ONNX: torch cannot export the model to it: {_line(fault)}")
    torch.export.save(traced, folder / "eager.pt2")
    exported.append(_VariantSource("torch", "eager", folder / "eager.pt2"))
    if not compiled:
        left_out.append("compiled: it was not asked for")
    elif not any(map(shutil.which, ("g++", "c++", "clang++"))):
        left_out.append("compiled: there is no C++ compiler")
    else:
        from torch._inductor import aoti_compile_and_package, config

        settings: dict[str, Any] = {"cpp.dynamic_threads": True}  # one file for any number of them
        if hasattr(config.aot_inductor, "precompile_headers"):
            settings["aot_inductor.precompile_headers"] = False  # they take longer than one model
        file = folder / f"model{COMPILED}"
        try:
            aoti_compile_and_package(traced, package_path=str(file), inductor_configs=settings)
            exported.append(_VariantSource("torch", "compiled", file))
        except Exception as fault:  # of any kind, by the compiler
            left_out.append(f"compiled: torch cannot compile the model: {_line(fault)}")
    examples = Examples(signature, inputs)
    for written in exported:
        verify(expected, program(written.file, 0)(examples.at(0, 16)), f"{model}: {written.file.name}")
    return exported, _batched(examples, exported[-1].file)


def _free(name: str, array: NDArray[Any]) -> TensorSpec:
    kind = next((key for key, kind in DATATYPES.items() if array.dtype == kind), str(array.dtype))
    return TensorSpec(name, kind, (-1, *array.shape[1:]))


def _in_words(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)


def _form(signature: Signature) -> str:
    """What models of one name have in common: requests are checked, counted and answered by any of them."""
    items = "" if signature.batched else ", one item at a time"
    return f"{_in_words(signature.inputs)}{items} for {len(signature.outputs)} outputs"


def _line(fault: BaseException) -> str:
    return next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)


def verify(expected: Outputs, outputs: Outputs, variant: str) -> None:
    """Refuse what differs.

    Raises:
        LessError: it does, and by how much.
    """
    if [array.shape for array in expected] != [array.shape for array in outputs]:
        shapes = " and ".join(str([array.shape for array in some]) for some in (outputs, expected))
        raise LessError(
            f"{variant}: refused: the shapes of the variant's and the model's outputs are {shapes}"
        )
    for mine, theirs in zip(expected, outputs, strict=True):
        if mine.dtype.kind != "f":
            difference, bound = float((mine != theirs).sum()), 0.0
        else:
            difference = float(np.abs(mine - theirs).max(initial=0.0))
            bound = TOLERATED * max(1.0, float(np.abs(mine).max(initial=0.0)))
        if not difference <= bound:
            words = f"it differs from the model by {difference:.3g}, {bound:.3g} is tolerated"
            raise LessError(f"{variant}: refused: {words}")


def _quantised(full: Path, examples: Examples, file: Path) -> bool:
    """Static int8 with QDQ nodes; whether ONNX Runtime knows a way to do so."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class CalibrationSamples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            count = min(len(next(iter(examples.inputs.values()))), 128)
            self.left = (examples.at(at, 16) for at in range(0, count, examples.batch(16)))

        def get_next(self) -> Any:
            return next(self.left, None)

    prepared = file.with_suffix(".prepared")
    try:
        quant_pre_process(str(full), str(prepared), skip_symbolic_shape=True)
        opset = max(
            part.version for part in onnx.load(prepared).opset_import if part.domain in ("", "ai.onnx")
        )
        quantize_static(
            str(prepared), str(file), CalibrationSamples(), quant_format=QuantFormat.QDQ,
            per_channel=opset >= 13, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
        program(file, 0)(examples.at(0, 1))
    except Exception:  # of an operator that cannot be quantised: float32 remains
        return False
    finally:
        prepared.unlink(missing_ok=True)
    return True


def _measured(
    programs: list[_VariantSource], examples: Examples, task: str, architecture: str
) -> Iterator[VariantFile]:
    """Each file with so many `THREADS`, for batches of one and of eight."""
    for framework, precision, file, right in programs:
        for threads in THREADS:
            load, slope, intercept, memory = _profile(file, examples, threads)
            for batch in dict.fromkeys((1, examples.batch(8))):
                name = f"{architecture}:{precision}-t{threads}-b{batch}"
                yield VariantFile(Variant(
                    name, architecture, task, framework, "cpu", precision, threads, batch, load, slope,
                    intercept, memory, right, float(threads),
                ), file, examples.signature)  # fmt: skip


def accuracy(file: Path, examples: Examples, labels: NDArray[Any]) -> float:
    """The part of the items whose first output is right: equal to the label, greatest at it, or (labels that
    are fractions) within `LOST` of the largest label."""
    count, step = len(labels), examples.batch(max(BATCHES))
    try:
        run = program(file, 0)
        first = [run(examples.at(at, step))[0] for at in range(0, count, step)]
        outputs = np.concatenate(
            [array if examples.signature.batched else array[None] for array in first]
        ).reshape(count, -1)
        right = labels.reshape(count, -1)
        if labels.dtype.kind == "f":
            return float((np.abs(outputs - right) <= LOST * np.abs(labels).max()).all(1).mean())
        chosen = outputs.argmax(-1)[:, None] if outputs.dtype.kind == "f" else outputs
        return float(np.equal(chosen, np.broadcast_to(right, chosen.shape)).all(1).mean())
    except Exception as fault:  # the runtimes' own are no family of exceptions
        labelling = f"the labels {labels.shape} for output {examples.signature.outputs[0].name}"
        raise UserError(f"{file.name} cannot be held against {labelling}: {_line(fault)}") from fault


def _profile(file: Path, examples: Examples, threads: int) -> tuple[float, float, float, int]:
    """Of a replica as it will serve: seconds until it answers, of each item, and of any batch; and bytes."""
    began = time.perf_counter()
    replica = Replica(file, threads)
    try:
        replica.loaded()
        replica.ask(examples.at(0, 1))
        load = time.perf_counter() - began
        sizes, took = sorted({examples.batch(size) for size in BATCHES}), []
        for size in sizes:
            best = float("inf")
            for _ in range(REPEATS):
                began = time.perf_counter()
                replica.ask(examples.at(0, size))
                best = min(best, time.perf_counter() - began)
            took.append(best)
        memory = psutil.Process(replica.process.pid).memory_full_info().uss
    except (Died, Failed) as fault:
        raise UserError(f"{file}: a replica of it died while it was measured: {_line(fault)}") from fault
    finally:
        replica.end()
    if len(took) == 1:
        return load, took[0], 0.0, memory
    slope, intercept = least_squares([np.array(sizes, float), np.ones(len(sizes))], np.array(took))
    return load, slope, intercept, memory
