"""Stitching: what meets is accepted, what does not is told as the deadlock that it would be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_worlds import (
    Script,
    Tracer,
    capture_of,
    cluster_of,
    costs_of,
    ddp,
    fsdp,
    mesh_groups,
    pipeline,
    stepping,
)

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.policy.groups import Deadlock
from windtunnel.training.emulate.policy.stitch import StitchedWorld, stitch
from windtunnel.training.emulate.twin.emulate import replay_world


def world_of(script: Script, dims: dict[str, int], ranks: str = "all") -> StitchedWorld:
    groups = mesh_groups(dims)
    size = len(groups[0].ranks)
    return stitch(slice_world(capture_of(script, groups), size, ranks))


def hangs(script: Script, dims: dict[str, int]) -> str:
    """The sentence of the deadlock, be it found by stitching or by replay."""
    size = len(mesh_groups(dims)[0].ranks)
    with pytest.raises(Deadlock) as caught:
        world = world_of(script, dims)
        replay_world(world, cluster_of(1, size), costs_of(world.classes))
    return str(caught.value)


def scripted(do: Callable[[Tracer], None]) -> Script:
    return stepping(do, steps=1)


@pytest.mark.parametrize("ranks", ["auto", "all"])
def test_whole_worlds_meet(ranks: str) -> None:
    dims = {"pp": 4, "dp": 2, "tp": 2}
    world = world_of(pipeline(dims, 4, tensor=1, data=1, message=1), dims, ranks)
    assert world.size == 16
    assert len(world.calls) == 4
    world_of(ddp(), {"dp": 4}, ranks)
    world_of(fsdp(6, rows=11), {"dp": 6}, ranks)


def test_a_rank_that_leaves_early() -> None:
    def do(t: Tracer) -> None:
        for step in range(3):
            t.at(f"train.py:{step}")
            if not (t.rank == 3 and step == 2):
                t.call("all_reduce", "dp", 8)

    text = hangs(scripted(do), {"dp": 4})
    assert (
        "ranks 0-2 wait in all_reduce of 8 bytes (float32) (group 'dp' of 4 ranks, call 3) at train.py:2"
        in text
    )
    assert "rank 3 never joins it: no call follows number 2 at train.py:1" in text


def test_another_collective() -> None:
    def do(t: Tracer) -> None:
        t.at("train.py:88" if t.rank == 3 else "train.py:90")
        t.call("all_reduce" if t.rank == 3 else "all_gather", "dp", 64)

    text = hangs(scripted(do), {"dp": 4})
    assert (
        "rank 3 waits in all_reduce of 64 bytes (float32) (group 'dp' of 4 ranks, call 1) at train.py:88"
        in text
    )
    assert "but ranks 0-2 called all_gather of 64 bytes (float32) at train.py:90" in text


def test_other_bytes_and_other_roots() -> None:
    assert "rank 2 waits in all_reduce of 8 bytes" in hangs(
        scripted(lambda t: t.call("all_reduce", "dp", 8 if t.rank == 2 else 4) and None), {"dp": 4}
    )
    text = hangs(scripted(lambda t: t.call("broadcast", "dp", 8, peer=t.rank // 2) and None), {"dp": 3})
    assert "with root 1" in text
    assert "with root 0" in text


def test_only_the_broken_group_is_named() -> None:
    def do(t: Tracer) -> None:
        t.call("all_reduce", "tp", 4)
        if t.rank != 5:
            t.call("all_reduce", "tp", 4)

    text = hangs(scripted(do), {"dp": 4, "tp": 2})
    assert "rank 4 waits" in text
    assert "rank 5 never joins it" in text
    assert "likewise" not in text


def test_messages_that_nobody_receives() -> None:
    def lost(t: Tracer) -> None:
        t.at("pipe.py:7")
        if t.rank == 0:
            t.call("send", "pp", 16, peer=1)

    text = hangs(scripted(lost), {"pp": 2})
    assert "rank 0 waits in send of 16 bytes (float32) to rank 1 (group 'pp', message 1) at pipe.py:7" in text
    assert "rank 1 never receives it" in text

    def unsent(t: Tracer) -> None:
        if t.rank == 1:
            t.call("recv", "pp", 16, peer=0)

    assert "rank 0 never sends it" in hangs(scripted(unsent), {"pp": 2})

    def sized(t: Tracer) -> None:
        t.call("send" if t.rank == 0 else "recv", "pp", 16 + t.rank, peer=1 - t.rank)

    assert "but rank 1 called recv of 17 bytes" in hangs(scripted(sized), {"pp": 2})


def test_two_sends_before_two_receives_hang_unless_batched() -> None:
    def do(t: Tracer, batched: bool) -> None:
        t.at("ring.py:5")
        t.call("send", "pp", 4, peer=1 - t.rank, batched=batched)
        t.call("recv", "pp", 4, peer=1 - t.rank, batched=batched)

    text = hangs(scripted(lambda t: do(t, False)), {"pp": 2})
    assert "waits in send of 4 bytes (float32) to rank 1" in text
    assert "ring.py:5" in text
    world = world_of(scripted(lambda t: do(t, True)), {"pp": 2})
    assert replay_world(world, cluster_of(1, 2), costs_of(world.classes)).iteration_time_s == 4.0


def test_two_groups_in_opposite_order_on_one_stream() -> None:
    def do(t: Tracer) -> None:
        t.at(f"a.py:{t.rank}")
        for label in ("dp", "world") if t.rank == 0 else ("world", "dp"):
            t.call("all_reduce", label, 4, on=0)

    text = hangs(scripted(do), {"dp": 2})
    group = "(group '{}' of 2 ranks, call 1 of the step) at a.py:{}"
    assert "rank 0 waits in all_reduce of 4 bytes (float32) " + group.format("dp", 0) in text
    assert "rank 1 waits in all_reduce of 4 bytes (float32) " + group.format("world", 1) in text


def test_two_groups_in_opposite_order_on_streams_of_their_own() -> None:
    def do(t: Tracer) -> None:
        for label in ("dp", "world") if t.rank == 0 else ("world", "dp"):
            t.call("all_reduce", label, 4)

    world = world_of(scripted(do), {"dp": 2})
    assert replay_world(world, cluster_of(1, 2), costs_of(world.classes)).iteration_time_s == 4.0


def test_setup_is_checked_too() -> None:
    def script(t: Tracer) -> None:
        if t.rank:
            t.call("barrier", "world")
        t.step()
        t.op(1.0)
        t.step()

    assert "barrier" in hangs(script, {"dp": 2})


def test_steps_that_do_not_line_up() -> None:
    def script(t: Tracer) -> None:
        for _ in range(2):
            t.call("all_reduce", "dp", 4)
            if t.rank:
                t.step()
        t.step()

    with pytest.raises(ScriptError, match="steps of the ranks do not line up") as caught:
        world_of(script, {"dp": 2})
    assert not isinstance(caught.value, Deadlock)


def test_parts_that_were_not_captured_are_mentioned() -> None:
    dims = {"pp": 4}
    with pytest.raises(Deadlock, match="were not captured; use `ranks` auto"):
        world_of(pipeline(dims, 4), dims, "0,1")


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 6), st.data())
def test_any_call_left_out_is_found(stages: int, copies: int, microbatches: int, data: st.DataObject) -> None:
    """Take one collective or message of one rank out of a sound world: it hangs, and the rank is named."""
    dims = {"pp": stages, "dp": copies}
    base = pipeline(dims, microbatches, data=1)
    victim = data.draw(st.integers(0, stages * copies - 1))
    calls = 0

    class Counting(Tracer):
        def call(self, *args: object, **named: object) -> int:
            nonlocal calls
            if self.rank == victim:
                calls += 1
                if calls == left_out:
                    return -1
            return super().call(*args, **named)  # type: ignore[arg-type]

    def capture(ranks: list[int]) -> list[object]:
        slices = []
        for rank in ranks:
            tracer = Counting(rank, mesh_groups(dims))
            base(tracer)
            slices.append(tracer.slice())
        return slices

    left_out = 0
    stitch(slice_world(capture, stages * copies, "all"))  # type: ignore[arg-type]
    left_out, calls = data.draw(st.integers(1, calls)), 0
    with pytest.raises(Deadlock, match=rf"ranks? [0-9, -]*\b{victim}\b|ranks [0-9]+-[0-9]+"):
        stitch(slice_world(capture, stages * copies, "all"))  # type: ignore[arg-type]
