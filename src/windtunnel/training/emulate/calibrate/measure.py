"""Times of captured operators on the machine at hand, called through PyTorch's dispatcher from Python.

On a CPU what an operator costs depends on what lies in the caches, so the operators are run in the order of
the job, again and again, each call timed, and the median of an operator's calls is its time. An argument is
the most recent result of its shape and dtype if there is one (an activation comes warm out of the operator
before), else one of a few tensors taken in turn (parameters come cold). With each call a result of an
earlier one is given back, so that the price of allocating memory is in it, as it is in the job.

On a GPU calls are queued behind a kernel that only waits, so that the host's launches do not show.

What a training step costs beyond its operators (modules, autograd, the optimiser's Python) is measured with a
small transformer of many little operators, trained for a few steps on one thread. Its operators are recorded
and measured by themselves in the same order; what the real phases take longer, spread over their operators,
is the overhead of one operator in that phase.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from windtunnel.training.emulate.calibrate.operators import (
    OperatorCall,
    OperatorRecorder,
    make_tensor,
    map_tensors,
    plan_call,
)
from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, contiguous, signature
from windtunnel.training.emulate.twin.costs.work import kind_of

COPIES = 4  # tensors of one shape taken in turn where nothing recent fits
RECENT = 2
MAX_STOCK_BYTES = 4 << 30
Key = tuple[tuple[int, ...], str, tuple[int, ...]]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """PyTorch computes on ``count`` threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_operators(
    ops: Sequence[Operator], device: str = "cpu", threads: int = 1, *, order: Sequence[int] | None = None,
    seconds: float = 20.0, progress: Callable[[float], None] | None = None,
) -> DeviceProfile:  # fmt: skip
    """Run every operator of ``ops`` on ``device`` and tell its time.

    ``order``: indices into ``ops`` in the order of the job's step (each at least once to be measured;
    default: as listed). ``seconds``: about how long to measure. ``progress`` is called with the fraction
    done. Operators that cannot be run by themselves (views, unknown ones, unusual arguments) are left out
    of the profile, and ``provenance["skipped"]`` names them. Sets PyTorch's number of threads for the time
    of the call.
    """
    sequence = list(order) if order is not None else list(range(len(ops)))
    with on_threads(threads), torch.no_grad():
        runner = _Runner(ops, device)
        times = runner.on_gpu(progress) if device == "cuda" else runner.in_order(sequence, seconds, progress)
    provenance = {"threads": str(threads), "torch": torch.__version__, "measured": "yes"}
    if skipped := sorted({ops[row].name for row in sequence if not times[row]}):
        provenance["skipped"] = " ".join(skipped)
    measured = [(op, statistics.median(each)) for op, each in zip(ops, times, strict=True) if each]
    return DeviceProfile(device, measured, provenance=provenance)


class _Runner:
    """Plans, tensors and samples of one measurement."""

    def __init__(self, ops: Sequence[Operator], device: str) -> None:
        self.ops = ops
        self.device = device
        plans: dict[str, OperatorCall | None] = {}
        self.plans = [plans.setdefault(signature(op), plan_call(op, device)) for op in ops]
        self.samples: list[list[float]] = [[] for _ in ops]
        self.stock: dict[tuple[Key, int], deque[torch.Tensor]] = {}
        self.stock_bytes = 0
        self.recent: dict[Key, deque[torch.Tensor]] = {}
        self.recent_limits: dict[Key, int] = defaultdict(lambda: RECENT)

    def in_order(
        self, order: list[int], seconds: float, progress: Callable[[float], None] | None
    ) -> list[list[float]]:
        """Samples of each operator from passes over ``order`` until ``seconds`` are over, at least three."""
        uses = Counter(_key(out) for row in order for out in self.ops[row].outputs)
        # About half of what a step makes of a shape is held until backward.
        self.recent_limits = defaultdict(
            lambda: RECENT, {key: max(RECENT, count // 2) for key, count in uses.items()}
        )
        deadline = perf_counter() + seconds
        begin = perf_counter()
        passes = 0
        while passes < 4 or (perf_counter() < deadline and passes < 60):
            for row in order:
                self._call(row, keep=passes > 0)
            passes += 1
            if progress:
                progress(min(1.0, max(passes / 60, (perf_counter() - begin) / seconds)))
        return self.samples

    def on_gpu(self, progress: Callable[[float], None] | None) -> list[list[float]]:
        """Samples of each operator: calls queued back to back between two events."""
        for row in range(len(self.ops)):
            plan = self.plans[row]
            if plan is not None and self._call(row, keep=False):
                self.samples[row] = [self._gpu_seconds(plan) for _ in range(5)]
            self.recent.clear()
            self.stock.clear()
            self.stock_bytes = 0
            if progress:
                progress((row + 1) / len(self.ops))
        return self.samples

    def _gpu_seconds(self, plan: OperatorCall, calls: int = 10) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        sets = [self._arguments(plan) for _ in range(COPIES)]
        # About 2 ms: the launches below are queued before it ends.
        torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]
        start.record()
        for call in range(calls):
            positional, keywords = sets[call % COPIES]
            plan.function(*positional, **keywords)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    def _call(self, row: int, keep: bool) -> bool:
        """Run one operator, and keep its time; an operator that fails is not tried again."""
        plan = self.plans[row]
        if plan is None:
            return False
        op = self.ops[row]
        room = [self.recent.setdefault(_key(out), deque()) for out in op.outputs]
        old: list[Any] | None = [
            queue.popleft()
            for out, queue in zip(op.outputs, room, strict=True)
            if len(queue) > self.recent_limits[_key(out)]
        ]
        try:
            positional, keywords = self._arguments(plan)
            begin = perf_counter()
            result = plan.function(*positional, **keywords)
            del old  # the memory of an earlier result goes back, as in the job
            elapsed = perf_counter() - begin
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            self.plans[row] = None
            self.samples[row] = []
            return False
        if keep:
            self.samples[row].append(elapsed)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for out, queue, tensor in zip(op.outputs, room, results, strict=False):
            # What comes out here need not be what came out where it was captured.
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and str(tensor.dtype) == f"torch.{out.dtype}"
            ):
                queue.append(tensor)
        return True

    def _arguments(self, plan: OperatorCall) -> tuple[Any, dict[str, Any]]:
        used: set[int] = set()

        def make(meta: TensorMeta) -> torch.Tensor:
            tensor = self._tensor(meta, plan.index_limit, used)
            used.add(id(tensor))
            return tensor

        return map_tensors(plan.positional, make), {
            key: map_tensors(v, make) for key, v in plan.keywords.items()
        }

    def _tensor(self, meta: TensorMeta, limit: int, used: set[int]) -> torch.Tensor:
        key = _key(meta)
        recent = self.recent.get(key, ())
        # The first argument of a shape is what was made last, still warm; a second one was made long before.
        for tensor in recent if used else reversed(recent):
            if id(tensor) not in used:
                return tensor
        turn = self.stock.setdefault((key, limit), deque())
        if len(turn) < COPIES and self.stock_bytes + meta.nbytes < MAX_STOCK_BYTES:
            device = "cpu" if meta.device == "cpu" else self.device
            turn.append(make_tensor(meta, device, limit))
            self.stock_bytes += meta.nbytes
        for _ in range(len(turn)):
            turn.rotate(1)
            if id(turn[0]) not in used:
                return turn[0]
        tensor = make_tensor(meta, "cpu" if meta.device == "cpu" else self.device, limit)
        turn.append(tensor)
        self.stock_bytes += meta.nbytes
        return tensor


def _key(meta: TensorMeta) -> Key:
    return meta.shape, meta.dtype, meta.stride or contiguous(meta.shape)


WIDTH, HEADS, LAYERS, ROWS = 32, 2, 6, 16
"""Of a small transformer."""


class Block(nn.Module):
    """A transformer block so small that its operators take hardly longer than their dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        z: torch.Tensor = self.down(nn.functional.silu(self.up(x)))
        return x + z


def measure_overhead(threads: int = 1, repeats: int = 30) -> dict[str, float]:
    """Host seconds for each operator in ``"forward"``, ``"recompute"``, ``"backward"``, ``"optimizer"`` and
    ``"other"``, beyond the operator itself, and of one ``"view"``, on this machine's CPU."""
    with on_threads(threads):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.rand(1, ROWS, WIDTH)
        state: dict[str, Any] = {}

        def forward() -> None:
            state["loss"] = model(x).sum()

        def backward() -> None:
            optimizer.zero_grad()
            state["loss"].backward()

        phases: dict[str, Callable[[], Any]] = {
            "forward": forward, "backward": backward, "optimizer": optimizer.step,
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in phases}
        for step in range(repeats):
            for name, run in phases.items():
                begin = perf_counter()
                run()
                if step > 2:
                    times[name].append(perf_counter() - begin)
        recorded: dict[str, list[Operator]] = {}
        for name, run in phases.items():
            with OperatorRecorder() as recorder:
                run()
            recorded[name] = recorder.operators
        view = _view_seconds()
        overhead = {
            name: _each(statistics.median(times[name]), recorded[name], view, threads) for name in phases
        }
    overhead["recompute"] = overhead["forward"]
    overhead["other"] = overhead["forward"]
    overhead["view"] = view
    return overhead


def _each(real: float, operators: list[Operator], view: float, threads: int) -> float:
    """Seconds of one operator beyond what it takes by itself, given that the phase took ``real`` seconds."""
    solid = [op for op in operators if kind_of(op) != "view"]
    profile = measure_operators(solid, "cpu", threads, seconds=2.0)
    alone = sum(profile.exact(op) or 0.0 for op in solid)
    return max(0.0, (real - alone - view * (len(operators) - len(solid))) / len(solid))


def _view_seconds() -> float:
    """Seconds of one view that autograd follows."""
    x = torch.rand(WIDTH, WIDTH, requires_grad=True)
    samples = []
    for _ in range(200):
        begin = perf_counter()
        x.view(-1).view(WIDTH, WIDTH).transpose(0, 1).view(WIDTH, WIDTH, 1)
        samples.append((perf_counter() - begin) / 4)
    return statistics.median(samples)


def small_model() -> nn.Sequential:
    """A transformer whose operators take hardly longer than their dispatch."""
    return nn.Sequential(*[Block() for _ in range(LAYERS)])
