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
    """a link of the catalogue, whose other fields hold where none is given here"""
    name: str | None = None
    """what tables call it"""
    bandwidth: Rate | None = None
    """the line rate in one direction, of all lanes of one device or of one NIC"""
    latency: Seconds | None = None
    """seconds of a message without bytes"""
    efficiency: Fraction | None = None
    """the share of the bandwidth that large messages reach"""
    source: str | None = None
    """where the figures come from"""


class DeviceSpec(BaseModel, extra="forbid"):
    base: str | None = None
    """a device of the catalogue, whose other fields hold where none is given here"""
    name: str | None = None
    """what tables call it"""
    vendor: str | None = None
    """its maker"""
    kind: Literal["gpu", "cpu"] | None = None
    """`gpu` or `cpu`"""
    torch_name: str | None = None
    """what `torch.cuda.get_device_name()` says"""
    capability: tuple[int, int] | None = None
    """compute capability, such as [9, 0]"""
    sm_count: Count | None = None
    """streaming multiprocessors"""
    memory_bytes: Bytes | None = None
    """memory, as the driver reports it to PyTorch"""
    memory_bandwidth: Rate | None = None
    """bytes/s of that memory"""
    l2_bytes: Annotated[int, _in("bytes", zero=True)] | None = None
    """level 2 cache"""
    power_watts: Watts | None = None
    """the power limit"""
    sustained: Fraction | None = None
    """the share of the tensor peak that the clock holds under the power limit"""
    peak_flops: dict[Dtype, Flops] | None = None
    """dense peak rate by dtype"""
    source: str | None = None
    """where the figures come from"""


AnyLink = Annotated[LinkSpec, BeforeValidator(_named)]


class HostSchema(BaseModel, extra="forbid"):
    device: Annotated[DeviceSpec, BeforeValidator(_named)] | None = None
    """a name from the catalogue, or fields; with `base` inside, only those that differ"""
    devices: Annotated[Count, Field(le=1024)] | None = None
    """devices in a host"""
    intra: AnyLink | None = None
    """the link between devices: a name, or fields"""
    intra_switched: bool | None = None
    """true: any two devices reach each other at the full rate; false: a mesh, lanes split between peers"""
    intra_hosts: Count | None = None
    """consecutive hosts that one NVLink switch joins"""
    nvls: bool | None = None
    """whether that switch reduces in the network (NVLink SHARP)"""
    nic: AnyLink | None = None
    """the network link: a name, or fields"""
    nics: Count | None = None
    """NICs of a host"""
    pcie: AnyLink | None = None
    """the link between host and device; a NIC is no faster than it"""
    cpu_cores: Count | None = None
    """cores of a host"""
    source: str | None = None
    """where the figures come from"""


class TopologySpec(BaseModel, extra="forbid"):
    kind: TopologyKind | None = None
    """how the hosts are joined"""
    oversubscription: Annotated[float, BeforeValidator(_whole), Field(ge=1, le=1000)] | None = None
    """capacity into a leaf over capacity out of it, from 1"""
    hosts_per_leaf: Count | None = None
    """hosts under a leaf switch (rail-optimised: under one set of rail switches)"""
    leaves_per_pod: Count | None = None
    """leaves (sets of rails) that one layer of spines joins"""
    dims: Annotated[tuple[Count, ...], BeforeValidator(_dims)] | None = None
    """sizes of a torus, `4x4x4`; their product is `hosts`"""
    hop_latency: Seconds | None = None
    """seconds for each switch"""
    source: str | None = None
    """where the figures come from"""


class MulticastSpec(BaseModel, extra="forbid"):
    kind: Literal["shufflecast"] | None = None
    """`shufflecast`: passive splitters beside the network"""
    splitter: Count | None = None
    """outputs of a splitter"""
    planes: Count | None = None
    """copies of the splitter network (1)"""


class ClusterSpec(BaseModel, extra="forbid"):
    base: str | None = None
    """a name such as `h100-sxm:16x8`; without it `hosts`, `host.devices` and `host.device` are needed"""
    name: str | None = None
    """what tables call it"""
    hosts: Annotated[Count, Field(le=MAX_HOSTS)] | None = None
    """how many hosts"""
    host: HostSchema = HostSchema()
    """the hosts, which are all alike"""
    topology: TopologySpec = TopologySpec()
    """the network between hosts"""
    multicast: MulticastSpec = MulticastSpec()
    """splitters beside the network"""
    price_per_device_hour: Annotated[float, BeforeValidator(_whole), Field(ge=0)] | None = None
    """in any currency; `sweep` uses it"""


MODELS: Mapping[tuple[str, ...], type[BaseModel]] = {
    (): ClusterSpec, ("host",): HostSchema, ("topology",): TopologySpec, ("multicast",): MulticastSpec,
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
    assignment = f"{field} is {value!r}"
    if kind == "value_error":
        return f"{assignment}, {context['error']}"
    limits = {"greater_than_equal": "ge", "less_than_equal": "le", "greater_than": "gt"}
    words = {"ge": "from {} up", "le": "at most {}", "gt": "greater than {}"}
    if kind in limits:
        return f"{assignment}, accepted is a number {words[limits[kind]].format(context[limits[kind]])}"
    if kind == "literal_error":
        return f"{assignment}, accepted is {context['expected']}"
    accepted_types = {
        "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
        "tuple": "a list, such as [9, 0]", "too": "a list of two whole numbers, such as [9, 0]",
        "missing": "a list of two whole numbers, such as [9, 0]", "dict": "a mapping of dtypes to FLOP/s",
        "model": "a mapping of fields",
    }  # fmt: skip
    return f"{assignment}, accepted is {accepted_types.get(kind.split('_')[0], first['msg'])}"
