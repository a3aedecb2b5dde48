"""A plan applied to a model: `apply` registers a communication hook with DistributedDataParallel.

    plan = gradsync.plan(profile)
    handle = apply(ddp, plan)   # on all ranks
    ...                         # train as before

DDP is told to make one bucket of each group of the plan (from its second step on, when it has seen the order
of gradients), so nothing is copied. Whatever buckets it makes instead, a group begins when the last of its
gradients is there, and a bucket is done when all groups that it holds a part of are.

Before the first step all ranks compare what they were given: ranks with other plans, models or settings are
refused on every rank. A plan that leaves all gradients as they are leaves DDP its own way, but for the sizes
of buckets where these gain; what waits in a state that it is given is added to the next gradients of this
rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.codecs import find
from windtunnel.training.gradsync.live.exchange import DEADLINE, Peers
from windtunnel.training.gradsync.live.executor import PlanExecutor
from windtunnel.training.gradsync.live.feedback import Feedback, redistributed
from windtunnel.training.gradsync.model import NONE, PLAIN, SyncPlan

_Future = torch.futures.Future[Tensor | Exception]
_running = weakref.WeakSet["Handle"]()
"""Handles that are not closed; one whose plan leaves DDP its own way has no hook to know it by."""


@dataclass
class _Bucket:
    """A bucket of DDP that is under way, and the groups that it holds a part of and that are not done."""

    buffer: Tensor
    future: _Future
    groups: set[int]


FIELDS = {"world", "rank", "steps", "residuals"}
"""Of a rank's state."""


class Handle:
    """A plan that runs. Part of a checkpoint by `state_dict`, one for each rank; `close` ends it.

    ``saved``: somebody asked for the state, and what waits is not lost with this process; a job that says
    what a loss of it costs reads it. ``closed``: DDP goes its own way again.
    """

    def __init__(
        self, ddp: DistributedDataParallel, plan: SyncPlan, deadline: float = DEADLINE,
        event: Callable[..., object] | None = None,
    ) -> None:  # fmt: skip
        self.ddp, self.plan = ddp, plan
        self.saved = self.closed = False
        self._parameters = named(ddp)
        self._device = next(iter(self._parameters.values())).device
        self._name_of = {parameter: name for name, parameter in self._parameters.items()}
        self._executor: PlanExecutor | None = None
        self._views: dict[int, dict[str, Tensor]] = {}
        self._buckets: list[_Bucket] = []
        self._lock = threading.Lock()
        self._adding: list[Any] = []
        self._group_of = {name: place for place, group in enumerate(plan.groups) for name in group.tensors}
        ddp._comm_hooks.clear()
        _lay_out(ddp, [sum(self._parameters[name].nbytes for name in group.tensors) for group in plan.groups])
        coded = any(group.option != PLAIN for group in plan.groups)
        # without an executor what waits is added parameter by parameter
        rows = [group.tensors for group in plan.groups] if coded else [(name,) for name in self._parameters]
        self._feedback = Feedback([{name: self._parameters[name].numel() for name in row} for row in rows])
        if coded:
            self._executor = PlanExecutor(plan, self._device, self._feedback, ddp.process_group, deadline)
            ddp.register_comm_hook(self, _hook)
        if event is not None and dist.get_rank(ddp.process_group) == 0:
            runs = self._executor.options if self._executor is not None else [PLAIN] * len(plan.groups)
            event("plan", digest=plan.digest(), runs=[option.words() for option in runs])
        _running.add(self)

    def state_dict(self) -> dict[str, Any]:
        """What waits to be sent on this rank, and how far random numbers are used up."""
        self.saved = True
        return {
            "world": self.plan.world, "rank": dist.get_rank(self.ddp.process_group),
            "steps": self._executor.steps if self._executor is not None else 0,
            "residuals": self._feedback.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """A rank's own state; or, where the number of ranks has changed, those of all ranks that were: what
        waited on ranks that are no more is dealt out to those that are.

        Raises:
            UserError: it is of another number of ranks, of another model, or of another version, or one
                rank's is missing; what waits here still does.
        """
        own = isinstance(state, Mapping)
        states = [state] if isinstance(state, Mapping) else [*state]
        if not states:
            raise UserError("gradsync: there is no state; those of all former ranks are accepted")
        if odd := next((state for state in states if state.keys() != FIELDS), None):
            raise UserError(
                f"gradsync: the state has the fields {', '.join(odd)}; accepted is one of this version, with "
                f"{', '.join(sorted(FIELDS))}"
            )
        states.sort(key=lambda state: state["rank"])
        rank, world, was = dist.get_rank(self.ddp.process_group), self.plan.world, states[0]["world"]
        if own and was != world:
            raise UserError(
                f"gradsync: the state is one of {was} ranks, the plan is for {world}; the states of all "
                "former ranks are accepted"
            )
        ranks = [state["rank"] for state in states]
        if not own and ranks != [*range(was)]:
            raise UserError(
                f"gradsync: the states are of ranks {ranks}; those of all {was} former ranks are accepted"
            )
        waits = redistributed([state["residuals"] for state in states], *((0, 1) if own else (rank, world)))
        self._feedback.load_state_dict(waits, self._device)
        if self._executor is not None:
            self._executor.go_on(states[0]["steps"])
        else:
            self._add(waits)

    def _add(self, names: Iterable[str]) -> None:
        """No executor sends what waits of these: it is added to the next gradients of this rank."""
        for hook in self._adding:
            hook.remove()
        places = {name: place for place, name in enumerate(self._parameters)}
        self._adding = [
            self._parameters[name].register_hook(partial(self._added, places[name])) for name in names
        ]

    def _added(self, place: int, gradient: Tensor) -> Tensor:
        return self._feedback.corrected(place, gradient, find(NONE)).view_as(gradient)

    def close(self) -> None:
        """End the plan and its threads, between two steps: the model trains on as under plain DDP, and may
        get another plan by `apply`. What waits is sent no more; the state still has it. To close again does
        nothing."""
        if self.closed:
            return
        self.closed = True
        _running.discard(self)
        self._add([])
        if self._executor is not None:
            self._executor.close()

    def _came(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A bucket's gradients are there. Groups that begin with it do so, in place where one is all of it;
        others are put together from the buckets that hold a part."""
        assert self._executor is not None
        buffer = bucket.buffer()
        names = tuple(self._name_of[parameter] for parameter in bucket.parameters())
        future: _Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        group = self._group_of[names[0]]
        with self._lock:
            self._buckets.append(_Bucket(buffer, future, {self._group_of[name] for name in names}))
        if names == self.plan.groups[group].tensors:
            self._executor.begin(group, buffer, partial(self._settle, group, buffer, [buffer]))
        else:
            for name, view in zip(names, bucket.gradients(), strict=True):
                group = self._group_of[name]
                views = self._views.setdefault(group, {})
                views[name] = view
                if len(views) == len(self.plan.groups[group].tensors):
                    del self._views[group]
                    ordered = [views[tensor] for tensor in self.plan.groups[group].tensors]
                    row = torch.cat([tensor.reshape(-1) for tensor in ordered])
                    self._executor.begin(group, row, partial(self._settle, group, row, ordered))
        return future.then(_unwrapped)

    def _settle(self, group: int, row: Tensor, parts: Sequence[Tensor], error: Exception | None) -> None:
        """``row`` is what becomes of ``parts``; buckets whose last group this was are done."""
        if error is None and parts[0] is not row:
            for target, part in zip(parts, row.split([view.numel() for view in parts]), strict=True):
                target.copy_(part.view_as(target))
        with self._lock:
            for bucket in self._buckets:
                bucket.groups.discard(group)
            ended = [bucket for bucket in self._buckets if not bucket.groups or error]
            self._buckets = [bucket for bucket in self._buckets if bucket.groups and not error]
        for bucket in ended:
            bucket.future.set_result(bucket.buffer if error is None else error)


def apply(
    ddp: DistributedDataParallel, plan: SyncPlan, deadline: float = DEADLINE, *,
    event: Callable[..., object] | None = None,
) -> Handle:  # fmt: skip
    """Have ``plan`` synchronise the gradients of ``ddp`` from its next step on. All ranks call it at once.
    ``deadline``: seconds that a collective may take before the step ends with `HostError`. ``event``: gets
    which plan runs, as ``job.event`` or ``EventLog(path).append`` take it.

    Raises:
        UserError: the plan is of another model or number of ranks, ranks have different plans, or the model
            has a hook already; on all ranks.
    """
    wrong = _unfit(ddp, plan)
    peers = Peers(ddp.process_group, deadline)
    # one that is refused on a single rank must be so on all, or the others would wait for it
    peers.agree(wrong or f"plan {plan.digest()}", "gradsync apply")
    if wrong:
        raise UserError(f"gradsync apply: {wrong}")
    return Handle(ddp, plan, deadline, event)


def named(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that DDP synchronises, by their names in its module."""
    ignored = set(ddp.parameters_to_ignore)
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _unfit(ddp: DistributedDataParallel, plan: SyncPlan) -> str:
    """Why the plan is not for this model; "" where it is."""
    world = dist.get_world_size(ddp.process_group)
    if plan.world != world:
        return f"the plan is for {plan.world} ranks, there are {world}"
    if other := _other_hook(ddp):
        return f"the model has a communication hook already ({other}); a model without one is accepted"
    if uncoded := _sparse_as_dense(ddp, plan):
        return f"the gradient {uncoded!r} is sparse; by itself in a group of scheme 'sparse' it is accepted"
    numels = {name: parameter.numel() for name, parameter in named(ddp).items()}
    theirs = [name for group in plan.groups for name in group.tensors]
    if len(set(theirs)) != len(theirs):
        return "the plan names a gradient twice"
    if odd := sorted(numels.keys() ^ theirs):
        where = "plan" if odd[0] in numels else "model"
        return f"the {where} has no gradient {odd[0]!r}; a plan that was made for this model is accepted"
    if plan.numel not in (0, size := sum(numels.values())):
        return f"the plan is for {plan.numel:,} parameters, the model has {size:,}; a plan for it is accepted"
    return ""


def _other_hook(ddp: DistributedDataParallel) -> str:
    """The name of a hook that is registered and is not of a plan that was closed."""
    if any(handle.ddp is ddp for handle in _running):
        return "of another plan"
    for hook, _ in ddp._comm_hooks:
        if hook is not _hook:
            return str(getattr(hook, "__qualname__", hook))
    # those that PyTorch has in C++ are in no list
    name = "" if ddp._comm_hooks else ddp._get_ddp_logging_data().get("comm_hook", "")
    return "" if name == _hook.__qualname__ else str(name)


def _sparse_as_dense(ddp: DistributedDataParallel, plan: SyncPlan) -> str:
    """A gradient that comes as rows, for which the plan has what dense ones take; "" where there is none.
    A plan that is DDP's own way takes all."""
    if all(group.option == PLAIN for group in plan.groups):
        return ""
    parameters, sparse = ddp._build_params_for_reducer()
    names = {parameter: name for name, parameter in named(ddp).items()}
    rows = {names[parameter] for parameter, is_sparse in zip(parameters, sparse, strict=True) if is_sparse}
    fit = {group.tensors for group in plan.groups if group.option.scheme == "sparse"}
    return min((row for row in rows if (row,) not in fit), default="")


def _lay_out(ddp: DistributedDataParallel, sizes: Sequence[int]) -> None:
    """One bucket of DDP for each group, as soon as it has seen the order of gradients."""
    if not hasattr(ddp._bucket_config, "per_bucket_bytes_caps") or ddp._use_python_reducer:
        return  # PyTorch before 2.13: groups are put together from the buckets that there are
    ddp._bucket_config = replace(ddp._bucket_config, per_bucket_bytes_caps=tuple(sizes))
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()


def _hook(handle: Handle, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    if handle.closed:
        return allreduce_hook(handle.ddp.process_group, bucket)
    return handle._came(bucket)


def _unwrapped(future: _Future) -> Tensor:
    """As DDP takes it: an exception that a callback raises is one that backward ends with."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value


# DDP compares annotations with types, and these are text here
_hook.__annotations__ = {}
