"""Graph files: against a reader that knows nothing but the wire format, and back again."""

import struct
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from graph_examples import graph, graphs, varint, wire
from hypothesis import given, settings

from windtunnel.base.errors import UserError
from windtunnel.report.chakra import (
    COMM_COLL,
    COMM_RECV,
    COMM_SEND,
    COMM_TYPES,
    COMP,
    GraphNodes,
    read_graph,
    write_graph,
)
from windtunnel.report.graph_facts import facts


def _messages(data: bytes) -> list[bytes]:
    messages, at = [], 0
    while at < len(data):
        length, at = varint(data, at)
        messages.append(data[at : at + length])
        at += length
    return messages


def test_the_bytes_are_those_of_the_published_schema(tmp_path: Path) -> None:
    """Field numbers and wire types as in et_def.proto, value fields as ASTRA-sim's feeder reads them."""
    attributes = {"comm_type": 7, "comm_size": 2**33, "pg_name": "dp", "is_cpu_op": False, "comm_src": 5}
    attributes |= {
        "tensor_size": 9,
        "num_ops": 11,
        "comm_dst": 1,
        "comm_tag": 0,
        "own": 0.5,
        "ranks": [1, 300],
    }
    nodes = graph([COMP, COMM_COLL], [2e-6, 3.4e-6], [[], [0]], [{}, attributes], names=["mm", "rs"])
    write_graph(tmp_path / "g.et", nodes)
    head, first, second = _messages((tmp_path / "g.et").read_bytes())
    assert wire(head)[0] == (1, 2, b"1.0.0") and [field[0] for field in wire(head)] == [1, 2, 2]
    assert {number: value for number, _, value in wire(first) if number != 10} == {2: b"mm", 3: 4, 7: 2}
    plain = {number: value for number, _, value in wire(second) if number != 10}
    assert plain == {1: 10, 2: b"rs", 3: 7, 5: b"\x00", 7: 3}  # data_deps is packed; 3.4 µs are 3 whole ones
    decoded = {}
    for number, _, value in wire(second):
        if number == 10:
            parts = {inner: content for inner, _, content in wire(value)}
            decoded[parts.pop(1).decode()] = parts
    assert decoded == {
        "comm_type": {9: 7},
        "comm_size": {9: 2**33},
        "pg_name": {29: b"dp"},
        "is_cpu_op": {27: 0},
        "comm_src": {7: 5},
        "comm_dst": {7: 1},
        "comm_tag": {7: 0},
        "tensor_size": {13: 9},
        "num_ops": {9: 11},
        "own": {3: struct.pack("<d", 0.5)},
        "ranks": {10: b"\x0a\x03\x01\xac\x02"},
        "duration_seconds": {3: struct.pack("<d", 3.4e-6)},
    }


def _assert_same(a: GraphNodes, b: GraphNodes) -> None:
    for name in ("id", "type", "duration", "data_ptr", "data_deps", "ctrl_ptr", "ctrl_deps"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert [a.names[i] for i in a.name] == [b.names[i] for i in b.name]
    assert [a.attributes[i] for i in a.attribute] == [b.attributes[i] for i in b.attribute]
    assert a.metadata == b.metadata


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, nodes: GraphNodes) -> None:
    path = tmp_path_factory.mktemp("graph") / "deep" / "pp=0.et"
    write_graph(path, nodes)
    _assert_same(read_graph(path), nodes)


def test_messages_of_another_writer_are_read(tmp_path: Path) -> None:
    """No version, whole microseconds only, ids not packed, fields in another order, an empty attribute."""
    head = b"\x12\x08\x0a\x06schema"
    node = b"\x38\x07\x28\x01\x28\x02\x18\x04\x12\x01x\x08\x05"
    path = tmp_path / "x.et"
    path.write_bytes(bytes([len(head)]) + head + bytes([len(node)]) + node)
    nodes = read_graph(path)
    assert nodes.metadata == {"version": "", "schema": None}
    assert nodes.id.tolist() == [5] and nodes.data_deps.tolist() == [1, 2] and nodes.names == ["x"]
    assert nodes.duration.tolist() == [pytest.approx(7e-6)]
    assert facts(path, nodes).absent == 2


def test_a_file_that_is_cut_off_is_refused_or_ends_with_a_whole_message(tmp_path: Path) -> None:
    path = tmp_path / "g.et"
    write_graph(path, graph([COMP] * 5, [1e-6] * 5, [[], [0], [1], [2], [3]], [{"a": i} for i in range(5)]))
    data = path.read_bytes()
    ends, at = [], 0
    for message in _messages(data):
        at += 1 + len(message)
        ends.append(at)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if length in ends:
            assert len(read_graph(path)) == ends.index(length)
        else:
            with pytest.raises(UserError, match=r"g\.et: (cut off|not a Chakra trace)"):
                read_graph(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"PK\x03\x04 a zip file, no trace", b'{"json": 1}', b"\x1f\x8b\x08" * 9, b"\xff" * 40],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.et").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.et: .*not a Chakra trace"):
        read_graph(tmp_path / "x.et")


def test_a_missing_file_and_a_wrong_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.et: the graph cannot be read"):
        read_graph(tmp_path / "none.et")
    write_graph(tmp_path / "x.et", graph([9], [0.0], [[]], [{}]))
    with pytest.raises(UserError, match="node 0 has type 9, accepted are 1 to 7"):
        read_graph(tmp_path / "x.et")


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_chains_are_the_longest(nodes: GraphNodes) -> None:
    """NetworkX finds the longest paths of the same graph; every node has its own duration at its entry."""
    whole = nx.DiGraph()
    whole.add_nodes_from(["begin", *range(len(nodes))])
    for node in range(len(nodes)):
        whole.add_edge("begin", node, seconds=nodes.duration[node])
        for ptr, deps in ((nodes.data_ptr, nodes.data_deps), (nodes.ctrl_ptr, nodes.ctrl_deps)):
            for needed in deps[ptr[node] : ptr[node + 1]] // 10:
                whole.add_edge(int(needed), node, seconds=nodes.duration[node])
    graph_facts = facts(Path("g"), nodes)
    assert graph_facts.chain_seconds == pytest.approx(nx.dag_longest_path_length(whole, weight="seconds"))
    assert graph_facts.depth == nx.dag_longest_path_length(whole, weight=None, default_weight=1)
    assert sum(nodes.duration[node] for node in graph_facts.chain) == pytest.approx(graph_facts.chain_seconds)
    assert all(whole.has_edge(a, b) for a, b in zip(graph_facts.chain, graph_facts.chain[1:], strict=False))


def test_bytes_are_added_up_by_kind_and_group() -> None:
    gather = {"comm_type": COMM_TYPES.index("all_gather"), "comm_size": 100, "pg_name": "dp"}
    nodes = graph(
        [COMM_COLL, COMM_COLL, COMM_COLL, COMM_SEND, COMM_RECV, COMP],
        [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        [[]] * 6,
        [gather, gather, gather | {"pg_name": "tp"}, {"comm_size": 7}, {"comm_size": 8}, {}],
    )
    rows = [
        (row.kind, row.group, row.count, row.bytes, row.seconds)
        for row in facts(Path("g"), nodes).communication
    ]
    assert rows == [
        ("all_gather", "dp", 2, 200, 3.0),
        ("all_gather", "tp", 1, 100, 4.0),
        ("recv", "", 1, 8, 16.0),
        ("send", "", 1, 7, 8.0),
    ]


def test_a_circle_and_two_nodes_of_one_id_are_refused() -> None:
    with pytest.raises(UserError, match="node 0 go round in a circle"):
        facts(Path("g"), graph([COMP] * 2, [0.0] * 2, [[1], [0]], [{}, {}]))
    twice = graph([COMP] * 2, [0.0] * 2, [[], []], [{}, {}])
    twice.id[:] = 4
    with pytest.raises(UserError, match="two nodes have the same id"):
        facts(Path("g"), twice)
