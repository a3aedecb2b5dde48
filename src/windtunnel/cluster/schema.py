"""The cluster file that a user writes, checked field by field.

Everything is optional where a ``base`` gives it: ``base: h100-sxm:16x8`` of the whole file, or the name of a
catalogue entry in place of a device or link. What is not given stays None here and is filled in by
`windtunnel.cluster.load`. An error becomes one sentence: file, field, value, what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from windtunnel.base.errors import UserError
from windtunnel.base.fields import suggest
from windtunnel.base.units import parse_quantity
from windtunnel.cluster.catalogue import MAX_HOSTS
from windtunnel.cluster.model import TopologyKind


def _in(unit: str, zero: bool = False) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_quantity(value, unit, zero=zero))


def _whole(value: object) -> object:
    """A number of things: Pydantic would take True for 1."""
    if isinstance(value, bool):
        raise ValueError("accepted is a whole number")
    return value


def _named(value: object) -> object:
    """``nic: ib-400`` is short for ``nic: {base: ib-400}``."""
    return {"base": value} if isinstance(value, str) else value


def _dims(value: object) -> object:
    """``4x4x4`` is short for ``[4, 4, 4]``."""
    parts = value.split("x") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError("accepted is the size of each dimension, such as 4x4x4 or [4, 4, 4]")
    return parts


Bytes = Annotated[float, _in("bytes")]
Rate = Annotated[float, _in("bytes/s")]
Seconds = Annotated[float, _in("seconds", zero=True)]
Flops = Annotated[float, _in("FLOP/s")]
Watts = Annotated[float, _in("watts", zero=True)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Fraction = Annotated[float, BeforeValidator(_whole), Field(gt=0, le=1)]
Dtype = Literal[
    "float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn_x2", "int8"
]


class LinkSpec(BaseModel, extra="forbid"):
    base: str | None = None
    name: str | None = None
    bandwidth: Rate | None = None
    latency: Seconds | None = None
    efficiency: Fraction | None = None
    source: str | None = None


class DeviceSpec(BaseModel, extra="forbid"):
    base: str | None = None
    name: str | None = None
    vendor: str | None = None
    kind: Literal["gpu", "cpu"] | None = None
    torch_name: str | None = None
    capability: tuple[int, int] | None = None
    sm_count: Count | None = None
    memory_bytes: Bytes | None = None
    memory_bandwidth: Rate | None = None
    l2_bytes: Annotated[int, _in("bytes", zero=True)] | None = None
    power_watts: Watts | None = None
    sustained: Fraction | None = None
    peak_flops: dict[Dtype, Flops] | None = None
    source: str | None = None


AnyLink = Annotated[LinkSpec, BeforeValidator(_named)]


class HostSpec(BaseModel, extra="forbid"):
    device: Annotated[DeviceSpec, BeforeValidator(_named)] | None = None
    devices: Annotated[Count, Field(le=1024)] | None = None
    intra: AnyLink | None = None
    intra_switched: bool | None = None
    intra_hosts: Count | None = None
    nvls: bool | None = None
    nic: AnyLink | None = None
    nics: Count | None = None
    pcie: AnyLink | None = None
    cpu_cores: Count | None = None
    source: str | None = None


class TopologySpec(BaseModel, extra="forbid"):
    kind: TopologyKind | None = None
    oversubscription: Annotated[float, BeforeValidator(_whole), Field(ge=1, le=1000)] | None = None
    hosts_per_leaf: Count | None = None
    leaves_per_pod: Count | None = None
    dims: Annotated[tuple[Count, ...], BeforeValidator(_dims)] | None = None
    hop_latency: Seconds | None = None
    source: str | None = None


class MulticastSpec(BaseModel, extra="forbid"):
    kind: Literal["shufflecast"] | None = None
    splitter: Count | None = None
    planes: Count | None = None


class ClusterSpec(BaseModel, extra="forbid"):
    base: str | None = None
    name: str | None = None
    hosts: Annotated[Count, Field(le=MAX_HOSTS)] | None = None
    host: HostSpec = HostSpec()
    topology: TopologySpec = TopologySpec()
    multicast: MulticastSpec = MulticastSpec()
    price_per_device_hour: Annotated[float, BeforeValidator(_whole), Field(ge=0)] | None = None


MODELS: Mapping[tuple[str, ...], type[BaseModel]] = {
    (): ClusterSpec, ("host",): HostSpec, ("topology",): TopologySpec, ("multicast",): MulticastSpec,
    ("host", "device"): DeviceSpec,
    ("host", "intra"): LinkSpec, ("host", "nic"): LinkSpec, ("host", "pcie"): LinkSpec,
}  # fmt: skip


def check(document: Any, where: str) -> ClusterSpec:
    """``document`` (what YAML gave) as a `ClusterSpec`; ``where`` is the file that errors name.

    Raises `UserError` for the first thing that is wrong.
    """
    if not isinstance(document, dict):
        raise UserError(f"{where}: a cluster file holds {document!r}, accepted is a mapping of fields")
    try:
        return ClusterSpec.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{where}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """The first of Pydantic's errors in our words: field, value, what is accepted."""
    first = error.errors()[0]
    loc = tuple(str(part) for part in first["loc"] if part != "[key]")
    field, value, kind = ".".join(loc), first["input"], first["type"]
    context = first.get("ctx", {})
    if kind == "extra_forbidden":
        accepted = MODELS[loc[:-1]].model_fields
        return f"field {field} is unknown{suggest(loc[-1], accepted)}"
    if kind == "invalid_key":
        return f"a field is called {value!r}, accepted is text"
    shown = f"{field} is {value!r}"
    if kind == "value_error":
        return f"{shown}, {context['error']}"
    limits = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt"}
    words = {"ge": "from {} up", "le": "at most {}", "gt": "greater than {}"}
    if kind in limits:
        return f"{shown}, accepted is a number {words[limits[kind]].format(context[limits[kind]])}"
    if kind == "literal_error":
        return f"{shown}, accepted is {context['expected']}"
    accepted_types = {
        "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
        "tuple": "a list, such as [9, 0]", "too": "a list of two whole numbers, such as [9, 0]",
        "missing": "a list of two whole numbers, such as [9, 0]", "dict": "a mapping of dtypes to FLOP/s",
        "model": "a mapping of fields",
    }  # fmt: skip
    return f"{shown}, accepted is {accepted_types.get(kind.split('_')[0], first['msg'])}"
