"""Execution graphs as files: MLCommons Chakra's protobuf form, one file for each class of ranks.

A file is a stream of messages, each with its length before it as a varint: one ``GlobalMetadata``, then a
``Node`` for every operator, collective and message. ASTRA-sim and other Chakra tools read such files, and
`read_graph` reads theirs.

The messages are built without a compiler. Names, field numbers and types are those of
``schema/protobuf/et_def.proto`` of https://github.com/mlcommons/chakra (package ``ChakraProtoMsg``), so the
bytes are interchangeable; the ids of the two enumerations are there too. The descriptor lives in a pool of
its own: a program that has also imported Chakra's own module meets no clash.

Chakra counts a node's duration in whole microseconds, too coarse for kernels that take three of them. So the
exact seconds are written beside it as the attribute ``duration_seconds``, which `read_graph` prefers.

Source: Sridharan et al., "Chakra: Advancing Performance Benchmarking and Co-design using Standardized
Execution Traces" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from windtunnel.base.errors import UserError

NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
    "COMM_RECV_NODE", "COMM_COLL_NODE",
)  # fmt: skip
INVALID, METADATA, MEM_LOAD, MEM_STORE, COMP, COMM_SEND, COMM_RECV, COMM_COLL = range(8)

COMM_TYPES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter_block", "barrier",
)  # fmt: skip
"""The collective of each value of the attribute ``comm_type``."""

# The value's wire type of an attribute that ASTRA-sim's feeder reads; any other has that of its Python type.
ATTRIBUTE_FIELDS = {
    "is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_type": "int64_val",
    "comm_priority": "int32_val", "comm_size": "int64_val", "comm_src": "int32_val", "comm_dst": "int32_val",
    "comm_tag": "int32_val", "pg_name": "string_val",
}  # fmt: skip

_SCALARS = [
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
]

_Field = descriptor_pb2.FieldDescriptorProto


def _field(
    message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str, *, repeated: bool = False,
    oneof: bool = False,
) -> None:  # fmt: skip
    added = message.field.add(name=name, number=number)
    added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    if kind in _SCALARS:
        added.type = getattr(_Field, f"TYPE_{kind.upper()}")
    else:
        added.type = _Field.TYPE_ENUM if kind == "NodeType" else _Field.TYPE_MESSAGE
        added.type_name = f".ChakraProtoMsg.{kind}"
    if oneof:
        added.oneof_index = 0


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="windtunnel/chakra/et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    attribute = file.message_type.add(name="AttributeProto")
    _field(attribute, 1, "name", "string")
    _field(attribute, 2, "doc_string", "string")
    attribute.oneof_decl.add(name="value")
    for i, scalar in enumerate(_SCALARS):
        lists = f"{scalar.capitalize()}List"
        _field(attribute, 3 + 2 * i, f"{scalar}_val", scalar, oneof=True)
        _field(attribute, 4 + 2 * i, f"{scalar}_list", lists, oneof=True)
        _field(file.message_type.add(name=lists), 1, "values", scalar, repeated=True)

    metadata = file.message_type.add(name="GlobalMetadata")
    _field(metadata, 1, "version", "string")
    _field(metadata, 2, "attr", "AttributeProto", repeated=True)

    types = file.enum_type.add(name="NodeType")
    for value, name in enumerate(NODE_TYPES):
        types.value.add(name=name, number=value)

    values = file.message_type.add(name="IOInfo")
    for number, name in enumerate(("values", "shapes", "types"), start=1):
        _field(values, number, name, "string")

    node = file.message_type.add(name="Node")
    _field(node, 1, "id", "uint64")
    _field(node, 2, "name", "string")
    _field(node, 3, "type", "NodeType")
    _field(node, 4, "ctrl_deps", "uint64", repeated=True)
    _field(node, 5, "data_deps", "uint64", repeated=True)
    _field(node, 6, "start_time_micros", "uint64")
    _field(node, 7, "duration_micros", "uint64")
    _field(node, 8, "inputs", "IOInfo")
    _field(node, 9, "outputs", "IOInfo")
    _field(node, 10, "attr", "AttributeProto", repeated=True)
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))


AttributeProto = _message("AttributeProto")
GlobalMetadata = _message("GlobalMetadata")
Node = _message("Node")


VERSION = "1.0.0"
DURATION = "duration_seconds"

Attributes = Mapping[str, Any]
Longs = NDArray[np.int64]


@dataclass(frozen=True)
class GraphNodes:
    """The n nodes of a graph.

    ``id``: unique numbers; ``name`` indexes ``names``; ``type`` is Chakra's node type; ``duration`` is
    seconds; all of shape [n]. The nodes that node i needs to have ended are
    ``data_deps[data_ptr[i]:data_ptr[i + 1]]`` (ids), those that only order it are ``ctrl_deps`` alike.
    ``attribute[i]`` indexes ``attributes``, a table in which alike nodes share a row: values are bool, int,
    float, str, bytes or lists of one of these.
    """

    id: Longs
    name: NDArray[np.int32]
    names: list[str]
    type: NDArray[np.int32]
    duration: NDArray[np.float64]
    data_ptr: Longs
    data_deps: Longs
    ctrl_ptr: Longs
    ctrl_deps: Longs
    attribute: NDArray[np.int32]
    attributes: list[Attributes] = field(default_factory=lambda: [{}])
    metadata: Attributes = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.id)


def write_graph(path: Path, nodes: GraphNodes) -> None:
    """Write ``nodes`` to ``path`` (folders are made)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = dict(nodes.metadata)
    head = GlobalMetadata(version=metadata.pop("version", VERSION))
    for name, value in metadata.items():
        head.attr.append(_attribute(name, value))
    # The parts of a message may come in any order and in pieces (protobuf's encoding concatenates), so what
    # alike nodes share is encoded once.
    shared: dict[tuple[int, int, int], bytes] = {}
    columns = (nodes.id, nodes.name, nodes.type, nodes.attribute, nodes.duration)
    with path.open("wb") as file:
        _put(file, head.SerializeToString(deterministic=True))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for i, (number, name, kind, attribute, duration) in enumerate(rows):
            own = Node(id=number, duration_micros=round(duration * 1e6))
            own.data_deps.extend(nodes.data_deps[nodes.data_ptr[i] : nodes.data_ptr[i + 1]].tolist())
            own.ctrl_deps.extend(nodes.ctrl_deps[nodes.ctrl_ptr[i] : nodes.ctrl_ptr[i + 1]].tolist())
            own.attr.append(AttributeProto(name=DURATION, double_val=duration))
            key = (name, kind, attribute)
            if key not in shared:
                alike = Node(name=nodes.names[name], type=kind)
                for word, value in nodes.attributes[attribute].items():
                    alike.attr.append(_attribute(word, value))
                shared[key] = alike.SerializeToString(deterministic=True)
            _put(file, own.SerializeToString(deterministic=True) + shared[key])


def read_graph(path: Path) -> GraphNodes:
    """Read a graph that `write_graph` or another Chakra tool has written.

    Raises `UserError` when the file cannot be read, is cut off, or is no Chakra trace.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the graph cannot be read ({error.strerror})") from error
    messages = _messages(path, data)
    metadata = _head(path, next(messages, b""))
    ids: list[int] = []
    kinds: list[int] = []
    durations: list[float] = []
    names: dict[str, int] = {}
    name_of: list[int] = []
    tables: dict[tuple[bytes, ...], int] = {}
    attributes: list[Attributes] = []
    attribute_of: list[int] = []
    data_deps: list[int] = []
    ctrl_deps: list[int] = []
    data_ptr, ctrl_ptr = [0], [0]
    for number, message in enumerate(messages):
        try:
            node = Node.FromString(message)
        except DecodeError as error:
            raise UserError(f"{path}: message {number + 1} is no node of a Chakra trace") from error
        if not INVALID < node.type < len(NODE_TYPES):
            raise UserError(f"{path}: node {node.id} has type {node.type}, accepted are 1 to 7")
        duration = node.duration_micros * 1e-6
        retained = []
        for attribute in node.attr:
            if attribute.name == DURATION:
                duration = attribute.double_val
            else:
                retained.append(attribute)
        key = tuple(attribute.SerializeToString() for attribute in retained)
        if key not in tables:
            tables[key] = len(attributes)
            attributes.append({attribute.name: _value(attribute) for attribute in retained})
        ids.append(node.id)
        kinds.append(node.type)
        durations.append(duration)
        name_of.append(names.setdefault(node.name, len(names)))
        attribute_of.append(tables[key])
        data_deps.extend(node.data_deps)
        ctrl_deps.extend(node.ctrl_deps)
        data_ptr.append(len(data_deps))
        ctrl_ptr.append(len(ctrl_deps))
    return GraphNodes(
        id=_longs(path, ids), name=np.array(name_of, np.int32), names=list(names),
        type=np.array(kinds, np.int32), duration=np.array(durations, np.float64),
        data_ptr=np.array(data_ptr, np.int64), data_deps=_longs(path, data_deps),
        ctrl_ptr=np.array(ctrl_ptr, np.int64), ctrl_deps=_longs(path, ctrl_deps),
        attribute=np.array(attribute_of, np.int32), attributes=attributes or [{}], metadata=metadata,
    )  # fmt: skip


def _head(path: Path, message: bytes) -> dict[str, Any]:
    """The metadata at the head of a trace, with Chakra's version of it as ``version``."""
    wrong = UserError(f"{path}: not a Chakra trace, it does not begin with its metadata")
    try:
        head = GlobalMetadata.FromString(message)
    except DecodeError as error:
        raise wrong from error
    # Any bytes may parse as fields that are not known; a trace has the known ones and no others.
    known_fields = GlobalMetadata()
    known_fields.CopyFrom(head)
    known_fields.DiscardUnknownFields()
    if known_fields.ByteSize() != len(message) or not message:
        raise wrong
    attributes = {attribute.name: _value(attribute) for attribute in head.attr}
    return {"version": head.version, **attributes} if head.version != VERSION else attributes


def _longs(path: Path, values: list[int]) -> Longs:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:
        raise UserError(f"{path}: a node's id is 2^63 or more, accepted are smaller ones") from error


def _put(file: BinaryIO, message: bytes) -> None:
    length, head = len(message), bytearray()
    while length > 0x7F:
        head.append(0x80 | length & 0x7F)
        length >>= 7
    head.append(length)
    file.write(head + message)


def _messages(path: Path, data: bytes) -> Iterator[bytes]:
    """The messages of a stream, without their lengths."""
    position, end = 0, len(data)
    while position < end:
        begin, length, shift = position, 0, 0
        while True:
            if position == end or shift > 28:
                raise (
                    _cut(path, begin)
                    if position == end
                    else UserError(
                        f"{path}: not a Chakra trace, byte {begin} does not begin the length of a message"
                    )
                )
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if position + length > end:
            raise _cut(path, begin)
        yield data[position : position + length]
        position += length


def _cut(path: Path, begin: int) -> UserError:
    return UserError(f"{path}: cut off in the message that begins at byte {begin}, or not a Chakra trace")


def _attribute(name: str, value: Any) -> Any:
    first = value[0] if isinstance(value, list | tuple) and value else value
    # bool is an int to Python, so it is asked first.
    kinds = ((bool, "bool"), (int, "int64"), (float, "double"), (str, "string"), (bytes, "bytes"))
    kind = next((word for type_, word in kinds if isinstance(first, type_)), None)
    attribute_proto = AttributeProto(name=name)
    if isinstance(value, list | tuple):
        getattr(attribute_proto, f"{kind or 'int64'}_list").values.extend(value)
    elif kind is None:
        raise TypeError(f"attribute {name}: {value!r} has no form in a Chakra trace")
    else:
        setattr(attribute_proto, ATTRIBUTE_FIELDS.get(name, f"{kind}_val"), value)
    return attribute_proto


def _value(attribute: Any) -> Any:
    which = attribute.WhichOneof("value")
    if which is None:
        return None
    value = getattr(attribute, which)
    return list(value.values) if which.endswith("_list") else value
