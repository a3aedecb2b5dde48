"""The files of an architect, as those in ``catalogue``: an accelerator, and layers to map on it. Energies are
pJ of a word there, or a table of ``energies.yaml``. An error becomes one sentence: file, field, value, what
is accepted."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, StrictBool, StrictInt

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted, suggest
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.cluster.schema import Bytes, Rate
from windtunnel.silicon.mapper.model import OPERANDS, Accelerator, Layer, Level

CATALOGUE = ("eyeriss", "tpu", "cpu")
PICO = 1e-12
TABLE_WORD = 2.0  # bytes, in energies.yaml
WHOLE = "batch inputs outputs stride groups m n k heads queries keys dimension word"
ACCEPTED = {
    "array": "PEs along both axes, such as [16, 16]", "clock": "Hz, such as 200.0e+6",
    "mac_pj": "pJ of a multiply and add", "hop_pj": "pJ of a word that goes to a PE",
    "levels": "two to six by name, from the PE outwards", "capacity": "bytes, such as 128 KiB",
    "energy": "pJ of a word, or one of rf, sram and sram-artefact", "bandwidth": "a rate, such as 12.8 GB/s",
    "holds": "letters of the operands that it keeps, such as IO", "layers": "a mapping of names to layers",
    "size": "rows and columns of the output, such as [13, 13]", "kernel": "rows and columns, such as [3, 3]",
    "name": "letters, digits, _ and -", **dict.fromkeys(WHOLE.split(), "a whole number from 1 up"),
}  # fmt: skip

Count = Annotated[StrictInt, Field(ge=1, le=1 << 31)]
Pico = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[\w-]{1,64}$")]
Pair = tuple[Count, Count]


class LevelSpec(BaseModel, extra="forbid"):
    energy: Pico | str
    """pJ of a word, or a table of energies by capacity (`rf`, `sram`, `sram-artefact`)"""
    capacity: Bytes | None = None
    """bytes; the outermost level may leave it out"""
    bandwidth: Rate | None = None
    """bytes/s"""
    per_pe: StrictBool = False
    """each processing element has a memory of its own"""
    holds: Annotated[str, Field(pattern="^[IWO]{1,3}$")] = "IWO"
    """operands that it keeps: inputs, weights, outputs"""


class AcceleratorSpec(BaseModel, extra="forbid"):
    name: Name
    """what tables call it"""
    array: Pair
    """processing elements, rows and columns"""
    word: Annotated[Count, Field(le=16)]
    """bytes of an operand"""
    clock: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Hz"""
    mac_pj: Pico
    """pJ of a multiply and add"""
    hop_pj: Pico
    """pJ of a word that goes to a processing element"""
    levels: Annotated[dict[Name, LevelSpec], Field(min_length=2, max_length=6)]
    """memories, from the processing element outwards"""
    double_buffered: StrictBool = False
    """tiles take half of a memory, and moving overlaps computing"""
    source: str = ""
    """where the figures come from"""


class LayerSchema(BaseModel, extra="forbid"):
    inputs: Count | None = None
    """input channels"""
    outputs: Count | None = None
    """output channels"""
    size: Pair = (1, 1)
    """output rows and columns"""
    kernel: Pair = (1, 1)
    """rows and columns of the filter"""
    stride: Count = 1
    """of the filter"""
    groups: Count = 1
    """of channels"""
    m: Count | None = None
    """rows of a matrix product"""
    n: Count | None = None
    """columns of a matrix product"""
    k: Count | None = None
    """its inner dimension"""
    heads: Count = 1
    """of attention"""
    queries: Count | None = None
    """positions that ask"""
    keys: Count | None = None
    """positions that are looked up"""
    dimension: Count | None = None
    """of a head"""


class NetworkSpec(BaseModel, extra="forbid"):
    layers: Annotated[dict[Name, LayerSchema], Field(min_length=1)]
    """layers by name"""
    batch: Count = 1
    """items that all layers compute at once"""


def read_accelerator(name: str) -> Accelerator:
    """One of `CATALOGUE`, or of a YAML file. Raises `UserError`: there is none, or it is wrong."""
    if name in CATALOGUE:
        return accelerator(shipped(name), name)
    if not name.endswith((".yaml", ".yml")):
        raise UserError(f"`accelerator`: {name!r} is unknown{suggest(name, CATALOGUE)}, or a YAML file")
    return accelerator(read_mapping(Path(name), "file of an accelerator"), name)


def accelerator(document: Mapping[str, Any], where: str) -> Accelerator:
    """What ``document`` describes; ``where``: the file that errors name. Raises `UserError`."""
    spec = fitted(AcceleratorSpec, document, where, ACCEPTED)
    last, levels = len(spec.levels) - 1, []
    inner = max(1, min(last, sum(level.per_pe for level in spec.levels.values())))
    for place, (name, level) in enumerate(spec.levels.items()):
        wrong, holds = "", "".join(operand for operand in OPERANDS if operand in level.holds)
        if level.per_pe != (place < inner):
            wrong = f"per_pe {level.per_pe}, accepted are levels of each PE first, then shared ones"
        elif (level.per_pe or place == last) and holds != "IWO":
            wrong = f"holds {level.holds}, accepted in a PE and outermost is IWO"
        elif level.capacity is None and (place < last or isinstance(level.energy, str)):
            wrong = f"no capacity, accepted is {ACCEPTED['capacity']}"
        elif isinstance(level.energy, str) and level.energy not in shipped("energies"):
            wrong = f"energy {level.energy!r}, accepted is {ACCEPTED['energy']}"
        if wrong:
            raise UserError(f"{where}: level {name} has {wrong}")
        unscaled = Level(name, level.capacity, 0.0, level.bandwidth, level.per_pe, tuple(holds))
        if isinstance(level.energy, str):
            table, factor = shipped("energies")[level.energy]["at"], PICO * spec.word / TABLE_WORD
            unscaled = replace(
                unscaled, scale=tuple((float(size), pico * factor) for size, pico in table.items())
            )
            levels.append(unscaled.sized(level.capacity or 0.0))
        else:
            levels.append(replace(unscaled, energy=level.energy * PICO))
    rates = spec.clock, spec.mac_pj * PICO, spec.hop_pj * PICO
    return Accelerator(spec.name, spec.array, tuple(levels), spec.word, *rates, spec.double_buffered)


def read_layers(what: str) -> list[Layer]:
    """The layers of a network of the catalogue (``alexnet``), one of them (``alexnet.conv3``), or a file's.
    Raises `UserError`: there are none, or the file is wrong."""
    if what.endswith((".yaml", ".yml")):
        return layers(read_mapping(Path(what), "file of layers"), what)
    name, _, part = what.partition(".")
    if name not in shipped("networks"):
        raise UserError(f"`layer`: {what!r} is unknown{suggest(name, shipped('networks'))}, or a YAML file")
    network = layers(shipped("networks")[name], name)
    chosen = [layer for layer in network if part in ("", layer.name)]
    if not chosen:
        raise UserError(f"`layer`: {name} has no {part!r}{suggest(part, [layer.name for layer in network])}")
    return chosen


def layers(document: Mapping[str, Any], where: str) -> list[Layer]:
    """The nests of all layers in ``document``; an attention is two, not fused. Raises `UserError`."""
    spec = fitted(NetworkSpec, document, where, ACCEPTED)
    shapes = []
    for name, layer in spec.layers.items():
        groups = spec.batch * layer.heads
        if layer.inputs and layer.outputs:
            inputs, outputs = layer.inputs // layer.groups, layer.outputs // layer.groups
            if (inputs * layer.groups, outputs * layer.groups) != (layer.inputs, layer.outputs):
                numbers = f"{layer.inputs} inputs and {layer.outputs} outputs in {layer.groups} groups"
                raise UserError(f"{where}: layer {name} has {numbers}, accepted are multiples")
            bounds = (*reversed(layer.kernel), *reversed(layer.size), inputs, outputs, spec.batch)
            shapes.append(Layer(name, bounds, layer.stride, layer.groups))
        elif layer.n and layer.k:
            shapes.append(gemm(name, layer.m or spec.batch, layer.n, layer.k))
        elif layer.queries and layer.keys and layer.dimension:
            shapes.append(gemm(f"{name}.scores", layer.queries, layer.keys, layer.dimension, groups))
            shapes.append(gemm(f"{name}.context", layer.queries, layer.dimension, layer.keys, groups))
        else:
            raise UserError(
                f"{where}: layer {name} is of no kind, accepted are inputs and outputs (a convolution), "
                "n and k (a matrix product), or queries, keys and dimension (an attention)"
            )
    return shapes


def gemm(name: str, m: int, n: int, k: int, groups: int = 1) -> Layer:
    """``groups`` products of (m, k) and (k, n) matrices, each with matrices of its own."""
    return Layer(name, (1, 1, 1, 1, k, n, m), 1, groups)


@cache
def shipped(name: str) -> dict[str, Any]:
    """A file of the catalogue."""
    text = files("windtunnel.silicon.mapper").joinpath(f"catalogue/{name}.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document
