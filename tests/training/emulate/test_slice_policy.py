"""Which ranks are captured, and into which classes the world falls, against capturing every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_worlds import Tracer, capture_of, ddp, fsdp, mesh_groups, pipeline

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.graph import Category, EventKind, Group, NoteKind, Operator, Slice
from windtunnel.training.emulate.policy.classes import Classes, slice_world
from windtunnel.training.emulate.policy.groups import Deadlock, find_families, ranges
from windtunnel.training.emulate.policy.search import parse_ranks, segments


def members(classes: Classes) -> list[list[int]]:
    return sorted(cls.members.tolist() for cls in classes.classes)


def test_families_of_a_mesh_are_its_dimensions() -> None:
    dims = {"pp": 4, "dp": 3, "tp": 2}
    families = find_families(mesh_groups(dims), 24).families
    assert [(f.label, f.size, len(f.members)) for f in families] == [
        ("world", 24, 1), ("pp", 4, 6), ("dp", 3, 8), ("tp", 2, 12)
    ]  # fmt: skip
    places = np.stack([family.index_of for family in families[1:]], axis=1)
    assert places.tolist() == [list(np.unravel_index(rank, (4, 3, 2))) for rank in range(24)]


def test_unlabelled_meshes_of_one_size_are_told_apart() -> None:
    rows = [Group(str(i), ranks) for i, ranks in enumerate([(0, 1), (0, 2), (2, 3), (1, 3)])]
    families = find_families(rows, 4).families
    assert [family.members.tolist() for family in families] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


def test_a_family_may_cover_part_of_the_world() -> None:
    (family,) = find_families([Group("e", (0, 3), "embedding")], 4).families
    assert not family.covers
    assert family.group_of.tolist() == [0, -1, -1, 0]


def test_data_parallel_needs_one_rank_and_two_witnesses() -> None:
    log: list[int] = []
    classes = slice_world(capture_of(ddp(), mesh_groups({"dp": 64}), log), 64)
    assert members(classes) == [list(range(64))]
    assert log == [0, 63, 32]
    assert [cls.name for cls in classes.classes] == ["all"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_worlds(size: int) -> None:
    classes = slice_world(capture_of(ddp(), mesh_groups({"dp": size}), []), size)
    assert members(classes) == [list(range(size))]
    assert classes.captured == list(range(size))


def test_one_rank_for_each_stage_of_a_pipeline() -> None:
    dims = {"pp": 4, "dp": 2, "tp": 2}
    log: list[int] = []
    classes = slice_world(capture_of(pipeline(dims, 8), mesh_groups(dims), log), 16)
    assert [cls.name for cls in classes.classes] == ["pp=0", "pp=1", "pp=2", "pp=3"]
    assert members(classes) == [[4 * s, 4 * s + 1, 4 * s + 2, 4 * s + 3] for s in range(4)]
    assert len(log) == len(set(log)) == 6  # four stages, a witness at the first and at the last
    assert classes.notes == []


def test_a_ring_is_one_class() -> None:
    def ring(t: Tracer) -> None:
        ranks = t.groups[t.group("cp")].ranks
        here = ranks.index(t.rank)
        t.call("send", "cp", 4, peer=ranks[(here + 1) % len(ranks)])
        t.call("recv", "cp", 4, peer=ranks[here - 1])
        t.step()

    log: list[int] = []
    classes = slice_world(capture_of(ring, mesh_groups({"dp": 4, "cp": 16}), log), 64)
    assert members(classes) == [list(range(64))]
    assert len(log) <= 7


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 130))
def test_uneven_shards_are_found_exactly(size: int, rows: int) -> None:
    capture = capture_of(fsdp(size, layers=1, steps=1, rows=rows), mesh_groups({"dp": size}))
    auto, full = slice_world(capture, size), slice_world(capture, size, "all")
    assert members(auto) == members(full)


def test_a_split_is_told() -> None:
    capture = capture_of(fsdp(128, rows=1200), mesh_groups({"dp": 128}))  # 10 rows each, the last 8 have none
    classes = slice_world(capture, 128)
    assert members(classes) == [list(range(120)), list(range(120, 128))]
    assert len(classes.captured) < 16
    (note,) = classes.notes
    assert note.text.startswith("ranks 120-127 differ from rank 0: a smaller shard")


def test_rank_zero_alone_may_be_special() -> None:
    def script(t: Tracer) -> None:
        t.op(1.0)
        if t.rank == 0:
            t.op(2.0)
        t.call("all_reduce", "world", 4)
        t.step()

    log: list[int] = []
    classes = slice_world(capture_of(script, mesh_groups({"dp": 64}), log), 64)
    assert members(classes) == [[0], list(range(1, 64))]
    assert log == [0, 63, 32, 1]


def test_numbers_and_late_frees_do_not_split() -> None:
    """The first index of a rank's part of a vocabulary, and when the garbage collector ran."""

    def script(t: Tracer) -> None:
        t.alloc(512, Category.ACTIVATION)
        if t.rank % 2:
            t.add(EventKind.FREE, ref=t.names)
        t.op(1.0)
        if not t.rank % 2:
            t.add(EventKind.FREE, ref=1)
        t.step()

    def capture(ranks: list[int]) -> list[Slice]:
        slices = capture_of(script, mesh_groups({"tp": 8}))(ranks)
        return [replace(s, operators=[Operator("lt", (s.rank * 16, True), ())]) for s in slices]

    assert members(slice_world(capture, 8, "all")) == [list(range(8))]


def test_a_shard_that_differs_on_one_stage_only() -> None:
    dims = {"pp": 3, "tp": 4}
    base = pipeline(dims, 4)

    def script(t: Tracer) -> None:
        if t.rank == 11:  # the last stage's last part of the vocabulary
            t.alloc(512, Category.PARAMETER)
        base(t)

    capture = capture_of(script, mesh_groups(dims))
    assert members(slice_world(capture, 12)) == members(slice_world(capture, 12, "all"))


def test_ranks_that_never_talk_are_replicas() -> None:
    classes = slice_world(capture_of(lambda t: (t.op(1.0), t.step()), [Group("0", (0,), "world")]), 8)  # type: ignore[func-returns-value,arg-type,return-value]
    assert members(classes) == [list(range(8))]


def test_shards_that_differ_by_less_than_is_shown_are_no_warning() -> None:
    def script(t: Tracer) -> None:
        t.alloc((500 << 20) - 512 * (t.rank == 7), Category.PARAMETER)
        ddp()(t)

    classes = slice_world(capture_of(script, mesh_groups({"dp": 8})), 8)
    assert members(classes) == [[0, 1, 2, 3, 4, 5, 6], [7]]
    assert classes.notes == []


def test_captures_are_bounded() -> None:
    def script(t: Tracer) -> None:
        t.op(float(t.rank))
        t.step()

    log: list[int] = []
    classes = slice_world(capture_of(script, mesh_groups({"dp": 512}), log), 512, limit=40)
    assert len(log) == 40
    assert sum(map(len, members(classes))) == 512


def test_chosen_ranks_stand_in_for_others() -> None:
    dims = {"pp": 4, "dp": 2}
    log: list[int] = []
    classes = slice_world(capture_of(pipeline(dims, 4), mesh_groups(dims), log), 8, "0,7")
    assert log == [0, 7]
    assert members(classes) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert classes.assumed.tolist() == [2, 3, 4, 5]
    assert "ranks 2-5 have places in pp that no captured rank has" in classes.notes[0].text
    assert classes.notes[0].kind is NoteKind.APPROXIMATION


def test_ranks_of_the_user() -> None:
    assert parse_ranks("0, 17,4-6", 32) == [0, 4, 5, 6, 17]
    assert parse_ranks("all", 3) == [0, 1, 2]
    for wrong in ("x", "1,,2", "-1", "3-", "32", "6-4", "", "²"):
        with pytest.raises(UserError, match="`ranks`"):
            parse_ranks(wrong, 32)


def test_different_groups_are_a_deadlock() -> None:
    def capture(ranks: list[int]) -> list[object]:
        return [
            capture_of(ddp(), mesh_groups({"dp": 4} if rank < 2 else {"dp": 2, "tp": 2}))([rank])[0]
            for rank in ranks
        ]

    with pytest.raises(Deadlock, match="ranks 0 and 3 made different process groups"):
        slice_world(capture, 4)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_segments_of_a_line(lengths: list[int], data: st.DataObject) -> None:
    """Up to three runs of different content are always found, whatever is known at first."""
    line = [run for run, length in enumerate(lengths) for _ in range(length)]
    known: set[int] = set()
    while True:
        contents = dict.fromkeys(known)
        starts, wanted = segments(lambda i, contents=contents: line[i] if i in contents else None, len(line))  # type: ignore[misc]
        if not wanted:
            break
        assert not known & set(wanted)
        known |= set(wanted)
    middle = len(line) // 2
    samples = {line[0], line[middle], line[-1]}
    if len(samples) == len(lengths):  # a run between equal or missed samples is out of reach
        assert starts == [0, *np.cumsum(lengths)[:-1].tolist()]


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7]) == "1-3, 7"
    assert ranges(range(0, 20, 2), most=2) == "0, 2 and 8 more"
