"""Execution graphs as files: MLCommons Chakra's protobuf form, one file for each class of ranks.

A file is a stream of messages, each with its length before it as a varint: one ``GlobalMetadata``, then a
``Node`` for every operator, collective and message. ASTRA-sim and other Chakra tools read such files, and
`read_graph` reads theirs.

Chakra counts a node's duration in whole microseconds, too coarse for kernels that take three of them. So the
exact seconds are written beside it as the attribute ``duration_seconds``, which `read_graph` prefers.

Source: Sridharan et al., "Chakra: Advancing Performance Benchmarking and Co-design using Standardized
Execution Traces" (2023); the repository named in `chakra_schema`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.report.chakra_schema import (
    ATTRIBUTE_FIELDS,
    INVALID,
    NODE_TYPES,
    AttributeProto,
    GlobalMetadata,
    Node,
)

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


def write_graph(path: Path, nodes: GraphNodes, metadata: Attributes | None = None) -> None:
    """Write ``nodes`` to ``path`` (folders are made), with ``metadata`` (or the nodes' own) at its head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = dict(nodes.metadata if metadata is None else metadata)
    head = GlobalMetadata(version=known.pop("version", VERSION))
    for name, value in known.items():
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
        kept = []
        for attribute in node.attr:
            if attribute.name == DURATION:
                duration = attribute.double_val
            else:
                kept.append(attribute)
        key = tuple(attribute.SerializeToString() for attribute in kept)
        if key not in tables:
            tables[key] = len(attributes)
            attributes.append({attribute.name: _value(attribute) for attribute in kept})
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
        id=_longs(path, ids),
        name=np.array(name_of, np.int32),
        names=list(names),
        type=np.array(kinds, np.int32),
        duration=np.array(durations, np.float64),
        data_ptr=np.array(data_ptr, np.int64),
        data_deps=_longs(path, data_deps),
        ctrl_ptr=np.array(ctrl_ptr, np.int64),
        ctrl_deps=_longs(path, ctrl_deps),
        attribute=np.array(attribute_of, np.int32),
        attributes=attributes or [{}],
        metadata=metadata,
    )


def _head(path: Path, message: bytes) -> dict[str, Any]:
    """The metadata at the head of a trace, with Chakra's version of it as ``version``."""
    wrong = UserError(f"{path}: not a Chakra trace, it does not begin with its metadata")
    try:
        head = GlobalMetadata.FromString(message)
    except DecodeError as error:
        raise wrong from error
    # Any bytes may parse as fields that are not known; a trace has the known ones and no others.
    known = GlobalMetadata()
    known.CopyFrom(head)
    known.DiscardUnknownFields()
    if known.ByteSize() != len(message) or not message:
        raise wrong
    found = {attribute.name: _value(attribute) for attribute in head.attr}
    return {"version": head.version, **found} if head.version != VERSION else found


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
    found = AttributeProto(name=name)
    if isinstance(value, list | tuple):
        getattr(found, f"{kind or 'int64'}_list").values.extend(value)
    elif kind is None:
        raise TypeError(f"attribute {name}: {value!r} has no form in a Chakra trace")
    else:
        setattr(found, ATTRIBUTE_FIELDS.get(name, f"{kind}_val"), value)
    return found


def _value(attribute: Any) -> Any:
    which = attribute.WhichOneof("value")
    if which is None:
        return None
    value = getattr(attribute, which)
    return list(value.values) if which.endswith("_list") else value
