"""The messages of MLCommons Chakra's execution trace, built without a compiler.

Names, field numbers and types are those of ``schema/protobuf/et_def.proto`` of
https://github.com/mlcommons/chakra (package ``ChakraProtoMsg``), so the bytes are interchangeable; the ids of
the two enumerations are there too. The descriptor lives in a pool of its own: a program that has also
imported Chakra's own module meets no clash.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
INVALID, METADATA, MEM_LOAD, MEM_STORE, COMP, COMM_SEND, COMM_RECV, COMM_COLL = range(8)

COMM_TYPES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_block",
    "barrier",
)
"""The collective of each value of the attribute ``comm_type``."""

# The value's wire type of an attribute that ASTRA-sim's feeder reads; any other has that of its Python type.
ATTRIBUTE_FIELDS = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_priority": "int32_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "pg_name": "string_val",
}

_SCALARS = [
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
]

_Field = descriptor_pb2.FieldDescriptorProto


def _field(
    message: descriptor_pb2.DescriptorProto,
    number: int,
    name: str,
    kind: str,
    *,
    repeated: bool = False,
    oneof: bool = False,
) -> None:
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
