"""Compiled regions: kernels, what is kept for the backward pass, and blocks, by hand and as properties."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from region_tapes import Tape, meta, operators_of, peak

import windtunnel as wt
from benchmarks.training.emulate.jobs import example
from windtunnel.base.errors import ScriptError
from windtunnel.cluster.catalogue import device
from windtunnel.training.emulate.graph import EventKind, Operator, Phase
from windtunnel.training.emulate.twin.compiler import compiled
from windtunnel.training.emulate.twin.compiler.loops import Item, KernelLoops, kernels, parts_of
from windtunnel.training.emulate.twin.compiler.partition import minimum_cut
from windtunnel.training.emulate.twin.costs.profile import cost_of
from windtunnel.training.emulate.twin.costs.work import kind_of, moved_bytes

X = meta(4096, 4096)
SIZE = X.nbytes


def names(slice_):
    return [op.name for op in operators_of(slice_)]


def traffic(slice_):
    return sum(moved_bytes(op) for op in operators_of(slice_) if kind_of(op) != "matmul")


def seconds(slice_):
    part = device("h100-sxm")
    return sum(cost_of(op, part).seconds for op in operators_of(slice_))


def test_a_chain_is_one_kernel_that_moves_its_ends_and_allocates_nothing_between():
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    a = tape.one("aten.neg.default", [x])
    b = tape.one("aten.exp.default", [a])
    tape.free(a)
    c = tape.one("aten.mul.Tensor", [b, x])
    tape.free(b)
    tape.call = 0
    tape.one("aten.mm.default", [c, c], meta(1))
    eager, done = tape.slice(), compiled(tape.slice())
    assert names(done) == ["compiled.neg_exp_mul", "aten.mm.default"]
    assert moved_bytes(operators_of(done)[0]) == 2 * SIZE  # x once, though two read it; c
    assert peak(eager) - peak(done) == SIZE - 2  # a and b are never there; the small last result is


def test_what_a_product_reads_is_written_and_products_stay_where_they_are():
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    a = tape.one("aten.silu.default", [x])
    b = tape.one("aten.mm.default", [a, x])
    c = tape.one("aten.neg.default", [b])
    tape.call = 0
    tape.one("aten.neg.default", [c])
    done = compiled(tape.slice())
    assert names(done) == ["compiled.silu", "aten.mm.default", "compiled.neg", "aten.neg.default"]
    assert traffic(done) == traffic(tape.slice())


def test_a_norm_and_what_stands_before_and_after_it_are_one_kernel():
    tape = Tape()
    x, y, w = tape.new(X), tape.new(X), tape.new(meta(4096))
    tape.call = 1
    h = tape.one("aten.add.Tensor", [x, y])
    n, r = tape.op("aten._fused_rms_norm.default", [h, w], [X, meta(4096, 1, dtype="float32")])
    z = tape.one("aten.mul.Tensor", [n, n])
    tape.call = 0
    tape.one("aten.mm.default", [z, h])
    tape.one("aten.neg.default", [r])
    done = compiled(tape.slice())
    assert names(done)[0] == "compiled.add_fused_rms_norm_mul"
    # x and y in; h, the statistics and z out
    assert moved_bytes(operators_of(done)[0]) == 4 * SIZE + 4096 * 2 + 4096 * 4


def test_nothing_that_needs_the_maximum_of_all_is_in_the_kernel_that_looks_for_it():
    """As float8 does it: the largest value, a scale from it, and a cast with the scale."""
    tape = Tape()
    x, one = tape.new(X), meta(dtype="float32")
    tape.call = 1
    a = tape.one("aten.abs.default", [x])
    m = tape.one("aten.max.default", [a], meta())
    f = tape.one("aten._to_copy.default", [m], one)
    s = tape.one("aten.reciprocal.default", [f])
    y = tape.one("aten.mul.Tensor", [x, s])
    z = tape.one("aten._to_copy.default", [y], meta(4096, 4096, dtype="float8_e4m3fn"))
    tape.call = 0
    tape.one("aten._scaled_mm.default", [z, z, s, s], X)
    done = compiled(tape.slice())
    assert names(done)[:-1] == ["compiled.abs_max", "compiled.max_to_copy_reciprocal", "compiled.mul_to_copy"]
    first, second, third = operators_of(done)[:3]
    assert (moved_bytes(first), moved_bytes(second)) == (SIZE, 4)
    assert moved_bytes(third) == SIZE + SIZE // 2 + 4


def test_what_is_done_twice_is_done_once():
    """Two projections that cast the same input each; random numbers are drawn twice."""
    tape = Tape()
    x, w = tape.new(X), tape.new(X)
    tape.call = 1
    casts = [
        tape.one("aten._to_copy.default", [x], meta(4096, 4096, dtype="float8_e4m3fn")) for _ in range(2)
    ]
    for cast in casts:
        tape.one("aten._scaled_mm.default", [cast, w], X)
    drawn = [tape.one("aten.rand_like.default", [w]) for _ in range(2)]
    y = tape.one("aten.mul.Tensor", drawn)
    tape.call = 0
    tape.one("aten.mm.default", [y, y])
    done = compiled(tape.slice())
    assert names(done).count("compiled.to_copy") == 1
    assert names(done).count("aten._scaled_mm.default") == 2
    assert {len(op.tensors()) for op in operators_of(done) if "rand" in op.name} == {1}
    kernels_ = [op for op in operators_of(done) if "rand" in op.name]
    assert len(kernels_) == 1 and moved_bytes(kernels_[0]) == 2 * SIZE


def test_what_is_copied_into_fresh_memory_is_made_there():
    """``empty`` and ``copy_`` is how eager mode casts: the fresh block vanishes like any other."""
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    fresh = tape.new(meta(4096, 4096, dtype="float32"))
    tape.operators.append(
        Operator("aten.copy_.default", (tape.metas[fresh], X, False), (tape.metas[fresh],), 1)
    )
    tape.flow += [1, 2, 1, fresh, 0, x, 0, fresh, 0]
    tape.event(EventKind.OP, 0, 1)
    y = tape.one("aten.mul.Tensor", [fresh, fresh])
    tape.call = 0
    tape.one("aten.mm.default", [y, y])
    done = compiled(tape.slice())
    assert names(done)[0] == "compiled.copy_mul"
    assert fresh not in done.events["ref"][done.events["kind"] == EventKind.ALLOC]


def test_complex_numbers_are_left_to_aten():
    tape = Tape()
    x = tape.new(meta(64, 64, dtype="complex64"))
    tape.call = 1
    y = tape.one("aten.mul.Tensor", [x, x])
    tape.call = 0
    tape.one("aten.neg.default", [y])
    assert names(compiled(tape.slice())) == ["aten.mul.Tensor", "aten.neg.default"]


def block(checkpointed):
    """y = silu(x @ w) * x, and its gradient; kept for backward: what eager mode keeps, or with a checkpoint
    the product."""
    tape = Tape()
    x, w, dy = (tape.new(X) for _ in range(3))
    tape.call = 7
    p = tape.one("aten.mm.default", [x, w])
    s = tape.one("aten.silu.default", [p])
    y = tape.one("aten.mul.Tensor", [s, x])
    if checkpointed:
        tape.free(s)
    tape.call = 0
    tape.one("aten.neg.default", [y])
    tape.call = 7
    if checkpointed:
        tape.phase = Phase.RECOMPUTE
        s = tape.one("aten.silu.default", [p])
        tape.free(tape.one("aten.mul.Tensor", [s, x]))  # nobody reads it
    tape.phase = Phase.BACKWARD
    ds = tape.one("aten.mul.Tensor", [dy, x])
    dx = tape.one("aten.mul.Tensor", [dy, s])
    dp = tape.one("aten.silu_backward.default", [ds, p])
    tape.free(ds, s)
    dw = tape.one("aten.mm.default", [x, dp])
    dq = tape.one("aten.mm.default", [dp, w])
    tape.free(dp, p)
    e = tape.one("aten.add.Tensor", [dx, dq])
    tape.free(dx, dq)
    tape.call = 0
    tape.one("aten.neg.default", [dw])
    tape.one("aten.neg.default", [e])
    return tape


@pytest.mark.parametrize("checkpointed", [False, True])
def test_cheap_results_are_computed_again_and_not_kept(checkpointed):
    eager = block(checkpointed).slice()
    done = compiled(eager)
    backward = done.events[done.events["phase"] == Phase.BACKWARD]
    rows = backward["ref"][backward["kind"] == EventKind.OP]
    inside = [done.operators[row].name for row in rows]
    # silu again, in the kernel that reads it
    assert set(inside[0].removeprefix("compiled.").split("_")) == {"silu", "mul", "backward"}
    # dy, x and p are read; dx and dp written, in whose places nothing has to be kept.
    assert moved_bytes(done.operators[rows[0]]) == 5 * SIZE
    assert names(done).count("compiled.silu_mul") == 1
    assert peak(done) < peak(eager)
    born = {b: i for i, b in enumerate(done.events["ref"]) if done.events["kind"][i] == EventKind.ALLOC}
    assert 4 not in born, "the result of silu is nowhere written"


def test_what_is_kept_for_nothing_is_freed_after_the_forward_pass():
    """A checkpoint that keeps a product which its backward pass does not need."""
    tape = Tape()
    x, w = tape.new(X), tape.new(X)
    tape.call = 3
    p = tape.one("aten.mm.default", [x, w])
    y = tape.one("aten.add.Tensor", [p, x])
    tape.call = 0
    other = tape.new(X)
    dy = tape.one("aten.neg.default", [y])
    tape.call, tape.phase = 3, Phase.BACKWARD
    dx = tape.one("aten.mm.default", [dy, w])
    tape.free(p)
    tape.call = 0
    tape.one("aten.neg.default", [dx], meta(1))
    tape.free(other)
    done = compiled(tape.slice())
    place = {(k, r): i for i, (k, _, _, _, r, _) in enumerate(done.events.tolist()) if k in (1, 2)}
    assert place[EventKind.FREE, p] < place[EventKind.ALLOC, other]
    assert peak(tape.slice()) - peak(done) == SIZE - 2  # the last result was not there at the peak


def test_a_collective_is_a_border():
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    a = tape.one("aten.neg.default", [x])
    b = tape.gather(a)
    c = tape.one("aten.exp.default", [x])
    d = tape.one("aten.mul.Tensor", [b, c])
    tape.call = 0
    tape.one("aten.neg.default", [d])
    done = compiled(tape.slice())
    assert names(done) == ["compiled.neg", "compiled.exp_mul", "aten.neg.default"]
    kinds = done.events["kind"].tolist()
    assert kinds.index(EventKind.OP) < kinds.index(EventKind.COLLECTIVE)


def test_eager_slices_are_the_same_object():
    tape = Tape()
    tape.one("aten.neg.default", [tape.new(X)])
    eager = tape.slice()
    eager.flow = np.zeros(0, np.int64)
    assert compiled(eager) is eager


POINTWISE = ("aten.neg.default", "aten.mul.Tensor", "aten.add.Tensor")


@st.composite
def tapes(draw):
    """A rank with regions, and operators outside of them, in any mixture; everything is freed at last use."""
    tape = Tape()
    rows, width = meta(64, 128), meta(64, 1, dtype="float32")
    held = [tape.new(rows), tape.new(rows)]
    made = []
    for number in range(draw(st.integers(1, 3))):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tape.call, tape.phase = number + 1, phase
            for _ in range(draw(st.integers(1, 8))):
                reads = [draw(st.sampled_from(held)) for _ in range(2)]
                kind = draw(st.sampled_from(["point", "product", "norm", "most", "gather", "copy_"]))
                if kind == "point":
                    held.append(tape.one(draw(st.sampled_from(POINTWISE)), reads))
                elif kind == "product":
                    held.append(tape.one("aten.mm.default", reads, rows))
                elif kind == "norm":
                    held.append(tape.op("aten._fused_rms_norm.default", reads[:1], [rows, width])[0])
                elif kind == "most":
                    most = tape.one("aten.amax.default", reads[:1], meta(1, 1))
                    held.append(tape.one("aten.mul.Tensor", [reads[1], most]))
                elif kind == "gather":
                    held.append(tape.gather(reads[0]))
                else:
                    fresh = tape.new(rows)
                    tape.op("aten.neg.default", [reads[0]], [rows])
                    held.append(fresh)
                made.append(held[-1])
            tape.call = 0
            tape.one("aten.neg.default", [draw(st.sampled_from(held))])
    tape.phase = Phase.OTHER
    tape.one("aten.neg.default", [held[-1]])
    for block_ in draw(st.permutations(held)):
        tape.free(block_)
    return tape


@settings(max_examples=150, deadline=None)
@given(tape=tapes())
def test_compiled_is_never_slower_nor_larger_and_compiling_again_changes_nothing(tape):
    eager = tape.slice()
    done = compiled(eager)
    assert seconds(done) <= seconds(eager) * (1 + 1e-9)
    assert peak(done) <= peak(eager)
    assert compiled(done) is done
    again = compiled(tape.slice())
    assert again.events.tobytes() == done.events.tobytes() and again.operators == done.operators


@settings(max_examples=150, deadline=None)
@given(tape=tapes())
def test_what_is_not_of_a_region_stays_as_it_is(tape):
    eager = tape.slice()
    done = compiled(eager)
    for kind in (EventKind.COLLECTIVE, EventKind.WORK_WAIT):
        before, after = (events[events["kind"] == kind] for events in (eager.events, done.events))
        assert before.tobytes() == after.tobytes()
    calls = [tape.flow[int(e["value"]) - 1] for e in eager.events if e["kind"] == EventKind.OP]
    issued = [eager.operators[row] for row in eager.events["ref"][eager.events["kind"] == EventKind.OP]]
    outside = [op for op, call in zip(issued, calls, strict=True) if call == 0]
    kept = [op for op in operators_of(done) if op in outside and not op.name.startswith("compiled.")]
    assert [op.name for op in kept][-1] == outside[-1].name and len(kept) >= len(outside)
    products = [op.name for op in operators_of(eager)].count("aten.mm.default")
    assert names(done).count("aten.mm.default") <= products  # dead ones are gone, none is new


LOOPS = (
    None, KernelLoops("pointwise", 64), KernelLoops("pointwise", 4096), KernelLoops("row", 4096, 64),
    KernelLoops("full", 4096), KernelLoops("column", 4096),
)  # fmt: skip


@st.composite
def graphs_of_items(draw):
    items = []
    for number in range(draw(st.integers(1, 14))):
        reads = tuple(draw(st.lists(st.integers(0, number + 1), min_size=1, max_size=3, unique=True)))
        loops = draw(st.sampled_from(LOOPS))
        items.append(Item(loops, reads, (8,) * len(reads), (number + 2,), draw(st.booleans()), number // 6))
    return items


@settings(max_examples=300, deadline=None)
@given(items=graphs_of_items())
def test_kernels_can_run_one_after_another(items):
    of = kernels(items)
    assert kernels(items) == of
    writer = {value: i for i, item in enumerate(items) for value in item.writes}
    needs = {(of[writer[v]], of[i]) for i, item in enumerate(items) for v in item.reads if v in writer}
    waits = {a: {b for b, c in needs if c == a and b != a} for a in set(of)}
    while waits:
        free = [one for one, before in waits.items() if not before & waits.keys()]
        assert free, "kernels wait for each other in a circle"
        for one in free:
            del waits[one]
    for kernel in set(of):
        mine = [item for item, other in zip(items, of, strict=True) if other == kernel]
        assert len(mine) == 1 or all(item.loops is not None for item in mine)
        assert len({item.segment for item in mine}) == 1
        assert all(a.loops != b.loops or a.loops is not None for a, b in pairwise(mine))


def test_reductions_share_a_kernel_where_they_have_the_same_rows():
    for rows, expected in ((8, [0, 0]), (4, [0, 1])):
        items = [Item(KernelLoops("row", 64, n), (0,), (8,), (n,), True, 0) for n in (8, rows)]
        assert kernels(items) == expected


def test_the_least_is_kept():
    # 0 is given (4 bytes); 1 = f(0) (8), 2 = f(1) (2), both cheap; backward reads 1 and 2.
    weights, edges = (4.0, 8.0, 2.0), ((0, 1), (1, 2))
    none: frozenset[int] = frozenset()
    assert minimum_cut(weights, edges, frozenset({0}), none, frozenset({1, 2})) == {0}
    assert minimum_cut(weights, edges, frozenset({0}), none, frozenset({2})) == {2}
    assert minimum_cut(weights, edges, frozenset({0}), frozenset({1}), frozenset({1, 2})) == {1}


def test_small_reductions_are_written_out():
    groups = Operator("aten.sum.dim_IntList", (meta(2, 64, 8, 4, 128), (3,), False), (meta(2, 64, 8, 128),))
    assert [part.loops for part in parts_of(groups)] == [KernelLoops("pointwise", 2 * 64 * 8 * 128)]
    columns = Operator("aten.sum.dim_IntList", (meta(64, 128), (0,), True), (meta(1, 128),))
    assert [part.loops for part in parts_of(columns)] == [KernelLoops("column", 64 * 128)]
    rows = Operator("aten.mean.dim", (meta(64, 128), (-1,), True), (meta(64, 1),))
    assert [part.loops for part in parts_of(rows)] == [KernelLoops("row", 64 * 128, 64)]


def test_the_example_is_faster_and_smaller_compiled(monkeypatch, tmp_path):
    """From outside: the same job, with and without ``--compile``."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    arguments = ["--size", "debug", "--seq", "2048", "--batch", "4", "--parallel", "fsdp"]
    eager, done = (
        wt.emulate(example(), *arguments, *more, cluster="h100-sxm:1x2", report=False)
        for more in ((), ("--compile",))
    )
    assert done.summary.iteration_time_s < eager.summary.iteration_time_s
    peaks = [one.summary.ranks[0].peak_allocated_bytes for one in (done, eager)]
    assert peaks[0] < peaks[1]
    assert done.summary.model_flops_per_iteration == eager.summary.model_flops_per_iteration
    assert any(op.kind == "compiled" for op in done.summary.operators)
    assert not any(op.kind == "compiled" for op in eager.summary.operators)


def test_the_example_in_float8_is_faster_and_its_products_run_at_the_rate_of_float8(monkeypatch, tmp_path):
    pytest.importorskip("torchao")
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    arguments = ["--size", "debug", "--seq", "512", "--parallel", "fsdp", "--compile", "--fp8"]
    run = wt.emulate(example(), *arguments, cluster="h100-sxm:1x2", report=False)
    assert 0 < run.summary.mfu <= run.summary.hfu < 1
    products = next(op for op in run.summary.operators if op.name == "aten._scaled_mm.default")
    assert products.count == 6 * (7 * 3 + 3)  # forward and twice backward, and what checkpointing repeats
    assert run.summary.flops_dtype.startswith("float8")
    # A cast, and the search for the largest value: each with what it follows on.
    assert any("abs_max" in op.name for op in run.summary.operators)


@pytest.mark.conformance
def test_the_example_refuses_float8_where_it_cannot_go(monkeypatch, tmp_path):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    for more, words in (
        (["--tp", "2"], "does not go with --tp"),
        (["--dtype", "fp32"], "goes with --dtype bf16"),
    ):
        with pytest.raises(ScriptError, match="exit") as refused:
            wt.emulate(example(), "--fp8", *more, cluster="h100-sxm:1x2", report=False)
        assert words in str(refused.value) + refused.value.details
