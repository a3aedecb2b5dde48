"""What a job's synchronisation takes here: gradients, codecs and collectives, measured by all ranks at once.

Gradients are timed in steps whose all-reduces wait until backward is over, so that communication is not taken
for computing. Codecs are timed by all ranks at the same time, on one thread, since they share processors as
they will when they train. Collectives are called back to back, in sizes up to that of all gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.calibration.fit import least_squares
from windtunnel.training.gradsync.formats import steps
from windtunnel.training.gradsync.live import sparse
from windtunnel.training.gradsync.live.codecs import Codec, find
from windtunnel.training.gradsync.live.exchange import DEADLINE, Peers, scopes
from windtunnel.training.gradsync.live.feedback import Feedback
from windtunnel.training.gradsync.live.hook import apply, named
from windtunnel.training.gradsync.live.sparse import units_of
from windtunnel.training.gradsync.model import (
    CodecCost,
    CodecPoint,
    CollectiveFit,
    JobNetwork,
    Kind,
    Scope,
    SumTime,
    SyncProfile,
)
from windtunnel.training.gradsync.model import GradientTensor as Gradient
from windtunnel.training.gradsync.policy.plan import uniform_plan

SIZES = (1 << 6, 1 << 15, 1 << 17, 1 << 19, 1 << 20, 1 << 22)
"""Of collectives, up to that of all gradients; the first four in any case. The first is what a call takes."""
CALLS, LONG = 4, 0.2
"""Of each size; a larger one than the first four is left out where those of the last took so many seconds: on
a link that is so slow a call's own time no longer counts."""
STEPS = 5
HANDED, HANDED_NUMEL, PAUSE = 16, 1 << 16, 0.01
"""Gradients whose handing over is timed, their elements and seconds of backward at most."""
REPEATS, LARGE, FEW = 7, 1 << 20, 3
"""Calls of each codec, and how many there are of ``LARGE`` elements and more, whose times vary little."""
MOST_NUMEL = 1 << 26
"""Elements that a codec is timed on at most; beyond, what it takes grows with them."""


class BackwardTimes:
    """When backward makes which gradient: marks that hooks of one module leave in some steps.

    A *step* is from one `begin` to the next; it has a forward and at least one backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._parameters = named(ddp)
        self._cuda = next(iter(self._parameters.values())).is_cuda
        self._steps: list[dict[str, Any]] = []
        self.sparse: dict[str, Tensor] = {}
        self._ddp, self._ended = ddp, ddp._post_forward
        ddp._post_forward = self._forward  # type: ignore[method-assign]
        self._handles = []
        for name, parameter in self._parameters.items():
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
            )

    def begin(self) -> None:
        self._steps.append({})
        self._mark("begin")

    def _forward(self, output: Any) -> Any:
        result = self._ended(output)
        self._mark("forward")
        return result

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        self._mark(name)
        if parameter.grad is not None and parameter.grad.is_sparse:
            self.sparse[name] = parameter.grad.detach()

    def _mark(self, name: str) -> None:
        if not self._steps:
            return
        if not self._cuda:
            self._steps[-1][name] = time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._steps[-1][name] = event

    def end(self) -> tuple[float, dict[str, float]]:
        """Take the hooks away. Medians over steps but the first: seconds before backward (a step less its
        backward), and until each gradient since the end of forward."""
        self._ddp._post_forward = self._ended  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()
        if self._cuda:
            torch.cuda.synchronize()
        whole = self._steps[1:-1]
        until = {
            name: median(self._between(step, "forward", step, name) for step in whole)
            for name in self._parameters
            if all(name in step for step in whole)
        }
        followed = self._steps[2:]
        lasted = median(
            self._between(step, "begin", after, "begin") for step, after in zip(whole, followed, strict=True)
        )
        return lasted - max(until.values(), default=0.0), until

    def _between(self, step: dict[str, Any], begin: str, other: dict[str, Any], end: str) -> float:
        if self._cuda:
            return float(step[begin].elapsed_time(other[end])) / 1e3
        return float(other[end] - step[begin])


class GradientReplay(nn.Module):
    """A job whose computing is replayed: layers that sleep in forward and in backward for as long as a trace
    says, and give gradients that were drawn once. All that follows a gradient is real.

    ``numels``: elements of each layer's gradient, in the order of forward; ``backward``: seconds of each;
    ``forward``: of all together.
    """

    def __init__(
        self, numels: Sequence[int], backward: Sequence[float], forward: float, device: torch.device
    ) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(numel, device=device)) for numel in numels)
        self._forward = forward
        draws = torch.Generator(device).manual_seed(dist.get_rank())
        for layer, seconds in zip(self.layers, backward, strict=True):
            gradient = torch.randn(layer.shape, generator=draws, device=device)
            layer.register_hook(partial(_computed, gradient, seconds))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward)
        for layer in self.layers:  # a chain: backward comes to one layer after the other
            x = x + layer[0]
        return x


def _computed(gradient: Tensor, seconds: float, _: Tensor) -> Tensor:
    time.sleep(seconds)
    return gradient.clone()


def replay(ddp: DistributedDataParallel) -> None:
    """A forward and backward of a `GradientReplay`."""
    ddp.zero_grad(set_to_none=True)
    ddp(torch.zeros(1, device=next(ddp.parameters()).device)).sum().backward()


def profile(
    ddp: DistributedDataParallel, step: Callable[[], object], *, codecs: Sequence[str] = (),
    hosts: int = 1, deadline: float = DEADLINE,
) -> SyncProfile:  # fmt: skip
    """Measure a job that is set up: ``step()`` is a forward and backward of one batch, with all that belongs
    to a step but the optimizer, which would train with gradients that are not synchronised. All ranks call it
    at once, and get the same. ``codecs``: those in the table of steps to a loss where none are named.
    ``hosts``: that the ranks lie on, one host after the other; 1: as if all links
    between ranks were alike. Gradients are left as None.

    Raises:
        UserError: no gradients were made, a codec is unknown, or ``hosts`` does not divide the ranks.
    """
    times = BackwardTimes(ddp)
    with ddp.no_sync():
        for _ in range(STEPS + 2):
            times.begin()
            step()
            ddp.zero_grad(set_to_none=True)
    return measured(ddp, times, codecs, hosts, deadline)


def measured(
    ddp: DistributedDataParallel, times: BackwardTimes, codecs: Sequence[str], hosts: int, deadline: float
) -> SyncProfile:
    """The profile of a job whose gradients have been timed, the same on all ranks."""
    group, world = ddp.process_group, dist.get_world_size(ddp.process_group)
    if hosts < 1 or world % hosts:
        raise UserError(f"gradsync profile: {hosts} hosts for {world} ranks; a divisor is accepted")
    before, until = times.end()
    if not until:
        raise UserError("gradsync profile: the steps made no gradients; a step is a forward and a backward")
    parameters, ranks = named(ddp), Peers(group, deadline).gather((before, until, {*times.sparse}))
    tables = [names for *_, names in ranks]
    # a rank that has none of a table's rows would not measure them, and the others wait for it
    if odd := sorted(set.union(*tables) - set.intersection(*tables)):
        raise UserError(
            f"gradsync profile: the sparse gradient {odd[0]!r} was made on some ranks only; steps that make "
            "it on every rank are accepted"
        )

    def row(name: str, seconds: float) -> Gradient:
        return Gradient(name, parameters[name].numel(), seconds)

    links, sums = network(ddp, hosts, deadline), list[SumTime]()
    rows, latest = [], 0.0
    for name in sorted(ranks[0][1], key=lambda name: ranks[0][1][name]):
        mean = sum(until.get(name, 0.0) for _, until, _ in ranks) / world
        tensor = row(name, max(0.0, mean - latest))
        if name in times.sparse:
            of = sparse.measure(Peers(group, deadline), units_of(times.sparse[name]))
            tensor = replace(tensor, sparsity=of)
            enough = sparse.TRIED / len(times.sparse)
            scheme_times = sparse.tried(times.sparse[name], of, links, group, deadline, enough)
            sums += [SumTime(name, scheme, seconds) for scheme, seconds in scheme_times.items()]
        rows.append(tensor)
        latest = max(latest, mean)
    # a gradient that not every step makes has no time, and must be synchronised all the same
    rows += [row(name, 0.0) for name in parameters if name not in ranks[0][1]]
    numels = codec_sizes(sum(row.numel for row in rows))
    device = next(iter(parameters.values())).device
    job = SyncProfile(
        tuple(rows), codec_costs(codecs or [*steps()], numels, device), replace(links, sums=tuple(sums)),
        sum(before for before, *_ in ranks) / world,
    )  # fmt: skip
    # codecs and the handing over take what they take on rank 0
    job = Peers(group, deadline).gather(job)[0]
    return Peers(group, deadline).gather(replace(job, handing=handing(ddp, job, deadline)))[0]


def handing(ddp: DistributedDataParallel, job: SyncProfile, deadline: float) -> float:
    """Seconds that backward stands still for each group beside what encoding takes: the hook is called, and
    the group is handed to other threads. By what a replay of the job (`HANDED` of its gradients) takes until
    its last gradient, with one group for each and without synchronisation."""
    dense = [tensor for tensor in job.tensors if tensor.numel and tensor.sparsity is None]
    if not dense or not job.codecs:
        return 0.0
    numels = [min(tensor.numel, HANDED_NUMEL) for tensor in (dense * HANDED)[-HANDED:]]
    pause = min(PAUSE, sum(tensor.backward for tensor in dense) / len(dense))
    device = next(iter(named(ddp).values())).device
    # of its own, so that what DDP itself waits for ends by the deadline
    group = scopes(1, ddp.process_group, deadline, hierarchical=False)["flat"]
    model = DistributedDataParallel(
        GradientReplay(numels, [pause] * HANDED, 0.0, device), process_group=group
    )
    rows = tuple(Gradient(name, tensor.numel(), pause) for name, tensor in named(model).items())[::-1]
    replayed = replace(job, tensors=rows)
    plans = [(codec, uniform_plan(replayed, codec.codec, 1)) for codec in job.codecs]
    used, plan = min(plans, key=lambda plan: plan[1].forecasts[0].nbytes)

    def until_last() -> float:
        times = BackwardTimes(model)
        for _ in range(STEPS + 2):
            times.begin()
            replay(model)
        return max(times.end()[1].values())

    with model.no_sync():
        alone = until_last()
    handle = apply(model, plan, deadline)
    for _ in range(2):  # DDP has its final buckets in the second
        replay(model)
    synchronised = until_last()
    handle.close()
    dist.destroy_process_group(group)
    # the last gradient is made before it is handed over
    return max(
        0.0, (synchronised - alone - sum(used.at(numel).encode for numel in numels[1:])) / (HANDED - 1)
    )


def codec_sizes(total: int) -> list[int]:
    """Elements of what codecs are timed on, ascending, in a job that has so many in all."""
    return sorted({max(1, min(MOST_NUMEL, total >> shift)) for shift in (0, 3, 6, 9, 12)})


def codec_costs(
    specs: Sequence[str], numels: Sequence[int], on: torch.device, repeats: int = REPEATS
) -> tuple[CodecCost, ...]:
    """Of each codec at each of ``numels``, ascending, on the device that has the gradients. Encoding is what
    a step takes: with the residual where the codec needs one.

    Raises:
        UserError: a spec is unknown.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs = []
        for codec in map(find, specs):
            points = (_point(codec, n, on, repeats if n < LARGE else min(FEW, repeats)) for n in numels)
            costs.append(CodecCost(codec.spec, tuple(points), codec.summable))
        return tuple(costs)
    finally:
        torch.set_num_threads(threads)


def _point(codec: Codec, numel: int, on: torch.device, repeats: int) -> CodecPoint:
    gradient = torch.randn(numel, generator=torch.Generator(on).manual_seed(numel), device=on)
    out, feedback = torch.zeros(numel, device=on), Feedback([{"": numel}])
    code = codec.encode(gradient, 0)
    return CodecPoint(
        numel,
        _seconds(lambda: feedback.encode(0, gradient, codec), on, repeats),
        _seconds(lambda: codec.decode(code, out), on, repeats),
        _seconds(lambda: codec.add(code, out), on, repeats),
        codec.nbytes(numel),
    )


def _seconds(call: Callable[[], object], on: torch.device, repeats: int) -> float:
    """The median of ``repeats`` calls, after one that compiles and fills caches."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if on.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def network(ddp: DistributedDataParallel, hosts: int, deadline: float) -> JobNetwork:
    """What collectives take between these ranks, by lines through the times of some sizes."""
    world = dist.get_world_size(ddp.process_group)
    places = world // hosts
    hierarchical = hosts > 1 and places > 1
    groups = scopes(hosts, ddp.process_group, deadline, hierarchical=hierarchical)
    device = next(ddp.module.parameters()).device
    total = sum(tensor.numel() * tensor.element_size() for tensor in named(ddp).values())
    sizes = [size for size in SIZES if size <= max(total, SIZES[3])]
    collective_costs = [
        _line(group, deadline, scope, kind, sizes, device)
        for scope, group in groups.items()
        for kind in get_args(Kind)
        if group.size() > 1
    ]
    for group in groups.values():
        dist.destroy_process_group(group)
    return JobNetwork(hosts, places, tuple(collective_costs))


def _line(
    group: dist.ProcessGroup, deadline: float, scope: Scope, kind: Kind, nbytes: Sequence[int],
    device: torch.device,
) -> CollectiveFit:  # fmt: skip
    members, slowest = group.size(), list[float]()
    for size in nbytes:
        if len(slowest) >= 4 and CALLS * slowest[-1] > LONG:
            break
        part = torch.zeros(-(-size // 4 // members), device=device)
        whole = torch.zeros(part.numel() * members, device=device)
        peers = Peers(group, deadline)
        call: dict[Kind, Callable[[], Tensor | None]] = {
            "allreduce": partial(peers.all_reduce, whole),
            "reduce_scatter": partial(peers.reduce_scatter, whole),
            "allgather": partial(peers.all_gather, part),
            "alltoall": partial(peers.all_to_all, whole.split(part.numel())),
        }
        # without pauses: a link that saves up a burst while it idles has none left after the first call
        marks = []
        for _ in range(CALLS):
            call[kind]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
        mine = median(after - before for before, after in pairwise(marks))
        slowest.append(max(Peers(group, deadline).gather(mine)))
    sizes, seconds = np.array(nbytes[: len(slowest)], float), np.array(slowest)
    fixed = float(seconds[0])
    (per_byte,) = least_squares([sizes[1:]], np.maximum(0.0, seconds[1:] - fixed))
    error = float(np.sum(np.abs(fixed + per_byte * sizes - seconds)) / np.sum(seconds))
    return CollectiveFit(scope, kind, fixed, per_byte, error)
