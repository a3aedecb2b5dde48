"""Compiled regions: kernels, what is kept for the backward pass, and blocks, by hand and as properties."""

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
from windtunnel.training.emulate.twin.compiler.fusion import kernels
from windtunnel.training.emulate.twin.compiler.loops import KernelLoops, loops_of
from windtunnel.training.emulate.twin.compiler.regions import (
    MOST_PARTS,
    Access,
    RegionNode,
    Regions,
    RegionValue,
    partition,
)
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
    a = tape.single("aten.neg.default", [x])
    b = tape.single("aten.exp.default", [a])
    tape.free(a)
    c = tape.single("aten.mul.Tensor", [b, x])
    tape.free(b)
    tape.call = 0
    tape.single("aten.mm.default", [c, c], meta(1))
    eager, done = tape.slice(), compiled(tape.slice())
    assert names(done) == ["compiled.neg_exp_mul", "aten.mm.default"]
    assert moved_bytes(operators_of(done)[0]) == 2 * SIZE  # x once, though two read it; c
    assert peak(eager) - peak(done) == SIZE - 2  # a and b are never there; the small last result is


def test_what_a_product_reads_is_written_and_products_stay_where_they_are():
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    a = tape.single("aten.silu.default", [x])
    b = tape.single("aten.mm.default", [a, x])
    c = tape.single("aten.neg.default", [b])
    tape.call = 0
    tape.single("aten.neg.default", [c])
    done = compiled(tape.slice())
    assert names(done) == ["compiled.silu", "aten.mm.default", "compiled.neg", "aten.neg.default"]
    assert traffic(done) == traffic(tape.slice())


def test_a_norm_and_what_stands_before_and_after_it_are_one_kernel():
    tape = Tape()
    x, y, w = tape.new(X), tape.new(X), tape.new(meta(4096))
    tape.call = 1
    h = tape.single("aten.add.Tensor", [x, y])
    n, r = tape.op("aten._fused_rms_norm.default", [h, w], [X, meta(4096, 1, dtype="float32")])
    z = tape.single("aten.mul.Tensor", [n, n])
    tape.call = 0
    tape.single("aten.mm.default", [z, h])
    tape.single("aten.neg.default", [r])
    done = compiled(tape.slice())
    assert names(done)[0] == "compiled.add_fused_rms_norm_mul"
    # x and y in; h, the statistics and z out
    assert moved_bytes(operators_of(done)[0]) == 4 * SIZE + 4096 * 2 + 4096 * 4


def test_nothing_that_needs_the_maximum_of_all_is_in_the_kernel_that_looks_for_it():
    """As float8 does it: the largest value, a scale from it, and a cast with the scale."""
    tape = Tape()
    x, scalar = tape.new(X), meta(dtype="float32")
    tape.call = 1
    a = tape.single("aten.abs.default", [x])
    m = tape.single("aten.max.default", [a], meta())
    f = tape.single("aten._to_copy.default", [m], scalar)
    s = tape.single("aten.reciprocal.default", [f])
    y = tape.single("aten.mul.Tensor", [x, s])
    z = tape.single("aten._to_copy.default", [y], meta(4096, 4096, dtype="float8_e4m3fn"))
    tape.call = 0
    tape.single("aten._scaled_mm.default", [z, z, s, s], X)
    done = compiled(tape.slice())
    assert names(done)[:-1] == ["compiled.abs_max", "compiled.to_copy_reciprocal", "compiled.mul_to_copy"]
    first, second, third = operators_of(done)[:3]
    assert (moved_bytes(first), moved_bytes(second)) == (SIZE + 2, 2 + 4)
    assert moved_bytes(third) == SIZE + SIZE // 2 + 4


def test_what_is_done_twice_is_done_once():
    """Two projections that cast the same input each; random numbers are drawn twice."""
    tape = Tape()
    x, w = tape.new(X), tape.new(X)
    tape.call = 1
    casts = [
        tape.single("aten._to_copy.default", [x], meta(4096, 4096, dtype="float8_e4m3fn")) for _ in range(2)
    ]
    for cast in casts:
        tape.single("aten._scaled_mm.default", [cast, w], X)
    drawn = [tape.single("aten.rand_like.default", [w]) for _ in range(2)]
    y = tape.single("aten.mul.Tensor", drawn)
    tape.call = 0
    tape.single("aten.mm.default", [y, y])
    done = compiled(tape.slice())
    assert names(done).count("compiled.to_copy") == 1
    assert names(done).count("aten._scaled_mm.default") == 2
    assert {len(op.tensors()) for op in operators_of(done) if "rand" in op.name} == {1}
    kernels_ = [op for op in operators_of(done) if "rand" in op.name]
    assert len(kernels_) == 1 and moved_bytes(kernels_[0]) == 2 * SIZE


def test_the_second_of_two_equal_results_may_be_changed_in_place_outside():
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    first, second = (tape.single("aten.neg.default", [x]) for _ in range(2))
    tape.call = 0
    tape.operators.append(Operator("aten.add_.Tensor", (X, 1), (X,)))
    tape.flow += [0, 1, 1, second, 0, second, 0]
    tape.event(EventKind.OP, len(tape.operators) - 1, len(tape.flow) - 6)
    tape.call, tape.phase = 1, Phase.BACKWARD
    y = tape.single("aten.mul.Tensor", [first, second])
    tape.call = 0
    tape.single("aten.mm.default", [y, y])
    done = compiled(tape.slice())
    assert names(done) == ["compiled.neg", "aten.add_.Tensor", "compiled.mul", "aten.mm.default"]
    assert peak(done) <= peak(tape.slice())


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
    y = tape.single("aten.mul.Tensor", [fresh, fresh])
    tape.call = 0
    tape.single("aten.mm.default", [y, y])
    done = compiled(tape.slice())
    assert names(done)[0] == "compiled.copy_mul"
    assert fresh not in done.events["ref"][done.events["kind"] == EventKind.ALLOC]


def test_complex_numbers_are_left_to_aten():
    tape = Tape()
    x = tape.new(meta(64, 64, dtype="complex64"))
    tape.call = 1
    y = tape.single("aten.mul.Tensor", [x, x])
    tape.call = 0
    tape.single("aten.neg.default", [y])
    assert names(compiled(tape.slice())) == ["aten.mul.Tensor", "aten.neg.default"]


def block(checkpointed):
    """y = silu(x @ w) * x, and its gradient; kept for backward: what eager mode keeps, or with a checkpoint
    the product."""
    tape = Tape()
    x, w, dy = (tape.new(X) for _ in range(3))
    tape.call = 7
    p = tape.single("aten.mm.default", [x, w])
    s = tape.single("aten.silu.default", [p])
    y = tape.single("aten.mul.Tensor", [s, x])
    if checkpointed:
        tape.free(s)
    tape.call = 0
    tape.single("aten.neg.default", [y])
    tape.call = 7
    if checkpointed:
        tape.phase = Phase.RECOMPUTE
        s = tape.single("aten.silu.default", [p])
        tape.free(tape.single("aten.mul.Tensor", [s, x]))  # nobody reads it
    tape.phase = Phase.BACKWARD
    ds = tape.single("aten.mul.Tensor", [dy, x])
    dx = tape.single("aten.mul.Tensor", [dy, s])
    dp = tape.single("aten.silu_backward.default", [ds, p])
    tape.free(ds, s)
    dw = tape.single("aten.mm.default", [x, dp])
    dq = tape.single("aten.mm.default", [dp, w])
    tape.free(dp, p)
    e = tape.single("aten.add.Tensor", [dx, dq])
    tape.free(dx, dq)
    tape.call = 0
    tape.single("aten.neg.default", [dw])
    tape.single("aten.neg.default", [e])
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
    p = tape.single("aten.mm.default", [x, w])
    y = tape.single("aten.add.Tensor", [p, x])
    tape.call = 0
    other = tape.new(X)
    dy = tape.single("aten.neg.default", [y])
    tape.call, tape.phase = 3, Phase.BACKWARD
    dx = tape.single("aten.mm.default", [dy, w])
    tape.free(p)
    tape.call = 0
    tape.single("aten.neg.default", [dx], meta(1))
    tape.free(other)
    done = compiled(tape.slice())
    place = {(k, r): i for i, (k, _, _, _, r, _) in enumerate(done.events.tolist()) if k in (1, 2)}
    assert place[EventKind.FREE, p] < place[EventKind.ALLOC, other]
    assert peak(tape.slice()) - peak(done) == SIZE - 2  # the last result was not there at the peak


def test_a_collective_is_a_border():
    tape = Tape()
    x = tape.new(X)
    tape.call = 1
    a = tape.single("aten.neg.default", [x])
    b = tape.gather(a)
    c = tape.single("aten.exp.default", [x])
    d = tape.single("aten.mul.Tensor", [b, c])
    tape.call = 0
    tape.single("aten.neg.default", [d])
    done = compiled(tape.slice())
    assert names(done) == ["compiled.neg", "compiled.exp_mul", "aten.neg.default"]
    kinds = done.events["kind"].tolist()
    assert kinds.index(EventKind.OP) < kinds.index(EventKind.COLLECTIVE)


POINTWISE = ("aten.neg.default", "aten.mul.Tensor", "aten.add.Tensor")


@st.composite
def tapes(draw):
    """A rank with regions, and operators outside of them, in any mixture; everything is freed at last use."""
    tape = Tape()
    rows, width = meta(64, 128), meta(64, 1, dtype="float32")
    held = [tape.new(rows), tape.new(rows)]
    blocks = []
    for number in range(draw(st.integers(1, 3))):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            tape.call, tape.phase = number + 1, phase
            for _ in range(draw(st.integers(1, 8))):
                reads = [draw(st.sampled_from(held)) for _ in range(2)]
                kind = draw(st.sampled_from(["point", "product", "norm", "most", "gather", "copy_"]))
                if kind == "point":
                    held.append(tape.single(draw(st.sampled_from(POINTWISE)), reads))
                elif kind == "product":
                    held.append(tape.single("aten.mm.default", reads, rows))
                elif kind == "norm":
                    held.append(tape.op("aten._fused_rms_norm.default", reads[:1], [rows, width])[0])
                elif kind == "most":
                    most = tape.single("aten.amax.default", reads[:1], meta(1, 1))
                    held.append(tape.single("aten.mul.Tensor", [reads[1], most]))
                elif kind == "gather":
                    held.append(tape.gather(reads[0]))
                else:
                    fresh = tape.new(rows)
                    tape.op("aten.neg.default", [reads[0]], [rows])
                    held.append(fresh)
                blocks.append(held[-1])
            tape.call = 0
            tape.single("aten.neg.default", [draw(st.sampled_from(held))])
    tape.phase = Phase.OTHER
    tape.single("aten.neg.default", [held[-1]])
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
    KernelLoops("staged", 4096),
)  # fmt: skip


def graph_of(nodes: list[tuple[KernelLoops | None, tuple[int, ...]]], segment: int = 1 << 20) -> Regions:
    """A forward graph in which node n writes value n + 2 and reads values before it, of 8 bytes each; values
    0 and 1 are given. A segment is so many nodes."""
    values = [RegionValue(0, -1), RegionValue(1, -1)]
    graph = []
    for number, (loops, reads) in enumerate(nodes):
        values.append(RegionValue(number + 2, number, outside=True))
        access = [Access(value, 0, 8) for value in reads]
        write = [Access(number + 2, 0, 8)]
        graph.append(RegionNode((1, False), number, 0, loops, access, write, False, float(number)))
    regions = Regions(graph, values, [], {}, np.arange(len(nodes)) // segment)
    regions.link()
    return regions


@st.composite
def graphs_of_nodes(draw):
    nodes = []
    for number in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.integers(0, number + 1), min_size=1, max_size=3, unique=True))
        nodes.append((draw(st.sampled_from(LOOPS)), tuple(reads)))
    return graph_of(nodes, 6)


@settings(max_examples=300, deadline=None)
@given(regions=graphs_of_nodes())
def test_kernels_can_run_one_after_another(regions):
    numbers = list(range(len(regions.nodes)))
    done = kernels(regions, numbers)
    assert done == kernels(regions, numbers)
    assert sorted(node for kernel in done for node in kernel.nodes) == numbers
    ran: set[int] = {-1}
    for kernel in sorted(done, key=lambda kernel: kernel.key):
        nodes = [regions.nodes[number] for number in kernel.nodes]
        makers = {regions.values[read.value].maker for node in nodes for read in node.reads}
        assert makers <= ran | set(kernel.nodes), "a kernel reads what is not there yet"
        ran.update(kernel.nodes)
        assert len(nodes) == 1 or all(node.loops is not None for node in nodes)
        assert len({int(regions.segment[node.event]) for node in nodes}) == 1
        staged = {
            number for number in kernel.nodes if regions.nodes[number].loops == KernelLoops("staged", 4096)
        }
        assert len(nodes) == 1 or not makers & staged


def test_reductions_share_a_kernel_where_they_have_the_same_rows():
    for rows, expected in ((8, 1), (4, 2)):
        regions = graph_of([(KernelLoops("row", 64, n), (0,)) for n in (8, rows)])
        assert len(kernels(regions, [0, 1])) == expected


@pytest.mark.parametrize(
    "sizes, wanted, extern, kept",
    [
        ((4, 8, 2), (1, 2), (), {0}),  # x makes both
        ((8, 8, 1), (2,), (), {2}),  # less than x, even twice
        ((4, 8, 2), (1, 2), (1,), {1}),  # a product reads a, which then makes b
    ],
)
def test_the_least_is_kept(sizes, wanted, extern, kept):
    """Of x (given), a = f(x) and b = f(a), both cheap, of which the backward pass reads some."""
    point, access = KernelLoops("pointwise", 64), [Access(value, 0, size) for value, size in enumerate(sizes)]
    forward = [
        RegionNode((1, False), n, 0, point, [access[n]], [access[n + 1]], False, float(n)) for n in (0, 1)
    ]
    backward = [
        RegionNode((1, True), n, 0, None if v in extern else point, [access[v]], [], False, float(n))
        for n, v in enumerate(wanted, 2)
    ]
    values = [RegionValue(0, -1), RegionValue(1, 0), RegionValue(2, 1)]
    regions = Regions([*forward, *backward], values, [], {}, np.zeros(8, np.int64))
    regions.link()
    partition(regions)
    assert {read.value for node in backward for read in node.reads} == kept


def test_a_residual_stream_is_not_added_up_from_its_beginning():
    """Each layer adds the result of a product to it, and its backward pass reads the sum."""
    point, layers = KernelLoops("pointwise", 64), 30
    values = [RegionValue(0, -1)]  # then of each layer the product and the sum
    forward, backward = [], []
    for layer in range(layers):
        before, product, total = (Access(2 * layer + more, 0, 8) for more in range(3))
        for loops, reads, write in ((None, [before], product), (point, [before, product], total)):
            values.append(RegionValue(len(values), len(forward)))
            forward.append(RegionNode((1, False), 0, 0, loops, reads, [write], False, 0.0))
        backward.append(RegionNode((1, True), 0, 0, point, [total], [], False, 0.0))
    regions = Regions([*forward, *backward], values, [], {}, np.zeros(1, np.int64))
    regions.link()
    partition(regions)
    assert max(len(node.reads) for node in backward) == MOST_PARTS
    assert sum(len(values[2 * layer + 2].users) > 2 for layer in range(layers)) < layers / 3


def test_small_reductions_are_written_out():
    groups = Operator("aten.sum.dim_IntList", (meta(2, 64, 8, 4, 128), (3,), False), (meta(2, 64, 8, 128),))
    assert loops_of(groups) == KernelLoops("pointwise", 2 * 64 * 8 * 128)
    columns = Operator("aten.sum.dim_IntList", (meta(64, 128), (0,), True), (meta(1, 128),))
    assert loops_of(columns) == KernelLoops("staged", 64 * 128)
    rows = Operator("aten.mean.dim", (meta(64, 128), (-1,), True), (meta(64, 1),))
    assert loops_of(rows) == KernelLoops("row", 64 * 128, 64)


def test_the_example_is_faster_and_smaller_compiled(monkeypatch, tmp_path):
    """From outside: the same job, with and without ``--compile``."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    arguments = ["--size", "debug", "--seq", "2048", "--batch", "4", "--parallel", "fsdp"]
    eager, done = (
        wt.emulate(example(), *arguments, *more, cluster="h100-sxm:1x2", report=False)
        for more in ((), ("--compile",))
    )
    assert done.summary.iteration_time_s < eager.summary.iteration_time_s
    peaks = [run.summary.ranks[0].peak_allocated_bytes for run in (done, eager)]
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
