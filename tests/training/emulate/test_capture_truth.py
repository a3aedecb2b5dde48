"""What is captured on the absent device is held against a real run on the CPU and against sums on paper."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from capturing import SCRIPTS, capture, operator_names, session, steady_events

from windtunnel.training.emulate.graph import COMM_STREAM, EventKind, Phase, Slice
from windtunnel.training.emulate.live.host import HeldBytes, StorageMode, Storages, tensors_of

WIDTH, BLOCKS = 64, 4

# Operators that only rearrange or create memory: whether they show differs with the level that is looked at.
SILENT = {
    "view", "t", "transpose", "expand", "detach", "as_strided", "_unsafe_view", "reshape", "alias",
    "permute", "unsqueeze",
    "squeeze", "slice", "select", "empty", "empty_like", "empty_strided", "ones_like", "zeros_like",
    "fill_", "zero_",
    "ones", "zeros", "copy_", "_to_copy", "normal_", "random_", "randn", "randint", "lift_fresh",
}  # fmt: skip


class Watcher(StorageMode):
    """Writes down the operators of a real run, and the bytes of all storages that are alive."""

    def __init__(self) -> None:
        self.held = HeldBytes()
        super().__init__(Storages(self.held.alloc, self.held.free))
        self.operators: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super().after(func, args, kwargs, out)
        self.operators.append((str(func), tuple(tuple(leaf.shape) for leaf in tensors_of(out))))


def tiny() -> Any:
    spec = importlib.util.spec_from_file_location("tiny", SCRIPTS / "tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def real() -> Watcher:
    """One training step of the tiny model on the CPU, after two that are not looked at."""
    module = tiny()
    model = module.build("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        module.step(model, optimizer, "cpu")
    with Watcher() as watcher:
        for parameter in model.parameters():
            watcher.storages.measure(parameter.untyped_storage())
        module.step(model, optimizer, "cpu")
    return watcher


@pytest.fixture(scope="module")
def emulated() -> Slice:
    return capture("tiny.py", "plain", "sgd")[0]


def loud(
    rows: list[tuple[str, tuple[tuple[int, ...], ...]]],
) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    return [row for row in rows if row[0].startswith("aten.") and row[0].split(".")[1] not in SILENT]


def test_the_operators_are_those_of_a_real_run(real: Watcher, emulated: Slice) -> None:
    events = steady_events(emulated)
    rows = [emulated.operators[e["ref"]] for e in events if e["kind"] == EventKind.OP]
    ours = loud([(row.name, tuple(out.shape for out in row.outputs)) for row in rows])
    theirs = loud(real.operators)
    assert len(theirs) > 50
    assert ours == theirs


def live_bytes(events: np.ndarray) -> np.ndarray:
    """Device bytes that are held after each event."""
    size: dict[int, int] = {}
    held, out = 0, np.zeros(len(events), np.int64)
    for i, event in enumerate(events):
        if event["kind"] == EventKind.ALLOC:
            size[event["ref"]] = event["value"]
            held += event["value"]
        elif event["kind"] == EventKind.FREE:
            held -= size.pop(event["ref"])
        out[i] = held
    return out


def test_the_peak_of_memory_is_that_of_a_real_run_to_the_byte(real: Watcher, emulated: Slice) -> None:
    begin, end = emulated.steady
    held = live_bytes(emulated.events)
    assert int(held[begin:end].max()) == real.held.peak


# -- a capture that stops early is a capture that does not


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Slice, Slice]]:
    """The same rank, ended at its steady step, and run for five steps."""
    with session("tiny.py", request.param, "adamw") as capture_session:
        short = capture_session.capture([0])[0]
        capture_session.settled = (5, 1)
        yield short, capture_session.capture([0])[0]


def named(slice_: Slice, begin: int, end: int) -> list[tuple[Any, ...]]:
    """A step's events with rows spelt out, and names that differ from step to step by their order in it."""
    first: dict[tuple[int, int], int] = {}
    rows = []
    for event in slice_.events[begin:end]:
        kind = EventKind(event["kind"])
        what: Any = int(event["ref"])
        value = int(event["value"])
        if kind == EventKind.OP:
            what = slice_.operators[what]
        elif kind == EventKind.COLLECTIVE:
            what, value = slice_.collectives[what], 0
        elif kind == EventKind.STEP:
            what = 0
        elif kind == EventKind.WORK_WAIT:
            value = 0
        elif what >= 0 and kind != EventKind.CALL:
            what = first.setdefault(
                (kind in (EventKind.RECORD, EventKind.WAIT, EventKind.SYNC), what), len(first)
            )
        rows.append(
            (kind, what, value, int(event["stream"]), int(event["phase"]), slice_.scopes[event["scope"]])
        )
    return rows


def test_the_steady_step_is_the_fifth_step_event_by_event(both: tuple[Slice, Slice]) -> None:
    short, long = both
    assert len(long.steps) == 5 and short.settled and len(short.steps) < 4
    assert named(short, *short.steady) == named(long, *long.steps[-1])


# -- sums on paper


def test_fully_shard_gathers_and_scatters_what_its_shards_hold() -> None:
    world = 8
    slice_ = capture("tiny.py", "fsdp", "adamw", ranks=(5,))[0]
    events = steady_events(slice_)
    collectives = [slice_.collectives[e["ref"]] for e in events if e["kind"] == EventKind.COLLECTIVE]

    def share(*shapes: tuple[int, ...]) -> int:
        """Elements of a rank's shards: the first dimension is cut into equal parts, padded up."""
        return sum(-(-shape[0] // world) * int(np.prod(shape[1:])) for shape in shapes)

    block = share((WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,))
    head = share((10, WIDTH), (10,))
    gathered = [(c.in_bytes, c.out_bytes) for c in collectives if c.kind == "all_gather"]
    scattered = [(c.in_bytes, c.out_bytes) for c in collectives if c.kind == "reduce_scatter"]
    forward = [block] * BLOCKS + [head]
    # bf16 out, float32 back; in backward every block is gathered again.
    assert sorted(gathered) == sorted((2 * n, 2 * n * world) for n in forward * 2)
    assert scattered == [(4 * n * world, 4 * n) for n in reversed(forward)]
    assert {c.dtype for c in collectives if c.kind == "reduce_scatter"} == {"float32"}
    assert all(slice_.groups[c.group].ranks == tuple(range(world)) for c in collectives)


def test_ddp_reduces_every_gradient_once_on_its_own_stream() -> None:
    slice_ = capture("tiny.py", "ddp", "adamw", ranks=(2,))[0]
    events = steady_events(slice_)
    calls = events[events["kind"] == EventKind.COLLECTIVE]
    rows = [slice_.collectives[e["ref"]] for e in calls]
    assert {row.kind for row in rows} == {"all_reduce"}
    assert sum(row.in_bytes for row in rows) == sum(p.numel() * 4 for p in tiny().build("cpu").parameters())
    assert (calls["stream"] >= COMM_STREAM).all() and (calls["phase"] == Phase.BACKWARD).all()
    assert "aten._fused_adamw_.default" in operator_names(slice_, events)
    # Whoever needs the gradients waits for the collective's stream first.
    optimizer = np.flatnonzero((events["phase"] == Phase.OPTIMIZER) & (events["kind"] == EventKind.OP))
    for place in np.flatnonzero(events["kind"] == EventKind.COLLECTIVE):
        after = events[place : optimizer.min()]
        done = after[(after["kind"] == EventKind.RECORD) & (after["stream"] == events[place]["stream"])]
        waits = after[(after["kind"] == EventKind.WAIT) & (after["stream"] == 0)]
        assert set(done["ref"]) & set(waits["ref"])
