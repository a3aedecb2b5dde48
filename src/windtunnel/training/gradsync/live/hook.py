"""A plan applied to a model: `apply` registers a communication hook with DistributedDataParallel.

    plan = decide(Wanted(profile))
    handle = apply(ddp, plan)          # on all ranks
    ...                                # train as before

DDP is told to make one bucket of each group of the plan (from its second step on, when it has seen the order
of gradients), so nothing is copied. Whatever buckets it makes instead, a group begins when the last of its
gradients is there, and a bucket is done when all groups that it holds a part of are.

Before the first step all ranks compare what they were given: ranks with other plans, models or settings are
refused on every rank. A plan that leaves all gradients as they are leaves DDP its own way, but for the sizes
of buckets where these gain.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.exchange import DEADLINE, Peers
from windtunnel.training.gradsync.live.executor import Executor, Outcome
from windtunnel.training.gradsync.live.feedback import State, redistributed
from windtunnel.training.gradsync.model import PLAIN, Plan

KEPT = 200
"""Times of iterations that are remembered."""


@dataclass
class _Bucket:
    """A bucket of DDP that is under way: groups that it holds a part of and that are not done."""

    future: Outcome
    buffer: Tensor
    groups: set[int]


class Handle:
    """A plan that runs. Part of a checkpoint by `state_dict`, one for each rank; `close` ends it.

    ``seconds``: of the latest iterations.
    """

    def __init__(self, ddp: DistributedDataParallel, plan: Plan, deadline: float) -> None:
        self.plan, self.seconds = plan, deque[float](maxlen=KEPT)
        self._ddp = ddp
        parameters = named(ddp)
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self._group_of = {name: place for place, one in enumerate(plan.groups) for name in one.tensors}
        shapes = [{name: tuple(parameters[name].shape) for name in one.tensors} for one in plan.groups]
        device = next(iter(parameters.values())).device
        self._executor = (
            Executor(plan, shapes, device, ddp.process_group, deadline)
            if any(one.option != PLAIN for one in plan.groups)
            else None
        )
        self._views: dict[int, dict[str, Tensor]] = {}
        self._buckets: list[_Bucket] = []
        self._lock = threading.Lock()
        self._begun: float | None = None
        _lay_out(ddp, [sum(_nbytes(parameters[name]) for name in one.tensors) for one in plan.groups])
        if self._executor is not None:
            ddp.register_comm_hook(self, _hook)

    def state_dict(self) -> dict[str, Any]:
        """What waits to be sent on this rank, and how far random numbers are used up."""
        if self._executor is None:
            return {
                "world": self.plan.world,
                "rank": 0,
                "steps": {},
                "feedback": State(residuals={}, momenta={}),
            }
        return {
            "world": self.plan.world, "rank": self._executor.rank, "steps": self._executor.state(),
            "feedback": self._executor.feedback.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """A rank's own state; or, where the number of ranks has changed, those of all ranks that were: what
        waited on ranks that are no more is dealt out to those that are.

        Raises:
            UserError: it is of another number of ranks, or of another model.
        """
        states = [state] if isinstance(state, Mapping) else [*state]
        if isinstance(state, Mapping) and state["world"] != self.plan.world:
            raise UserError(
                f"gradsync: the state is one of {state['world']} ranks, the plan is for {self.plan.world}; "
                "the states of all former ranks are accepted"
            )
        if self._executor is None:
            return
        parts = [one["feedback"] for one in sorted(states, key=lambda one: int(one["rank"]))]
        if not isinstance(state, Mapping):
            parts = [redistributed(parts, self._executor.rank, self.plan.world)]
        self._executor.load(states[0]["steps"], parts[0])

    def close(self) -> None:
        """End the threads; the model must not be trained with this hook any more."""
        if self._executor is not None:
            self._executor.close()

    def _came(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A bucket's gradients are there."""
        assert self._executor is not None
        now = time.perf_counter()
        if bucket.index() == 0:
            if self._begun is not None:
                self.seconds.append(now - self._begun)
            self._begun = now
        buffer = bucket.buffer()
        names = [self._name_of[parameter] for parameter in bucket.parameters()]
        group = self._group_of[names[0]]
        if tuple(names) == self.plan.groups[group].tensors:
            return _told(self._executor.begin(group, buffer, buffer))
        mine = _Bucket(_future(buffer), buffer, {self._group_of[name] for name in names})
        with self._lock:
            self._buckets.append(mine)
        for name, view in zip(names, bucket.gradients(), strict=True):
            group = self._group_of[name]
            views = self._views.setdefault(group, {})
            views[name] = view
            if len(views) == len(self.plan.groups[group].tensors):
                self._begin(group, self._views.pop(group))
        return _told(mine.future)

    def _begin(self, group: int, views: dict[str, Tensor]) -> None:
        """A group whose gradients lie in several places, or in another order."""
        assert self._executor is not None
        ordered = [views[name] for name in self.plan.groups[group].tensors]
        row = torch.cat([one.reshape(-1) for one in ordered])

        def done(future: Outcome) -> None:
            found = future.value()
            if not isinstance(found, Exception):
                for one, part in zip(ordered, row.split([view.numel() for view in ordered]), strict=True):
                    one.copy_(part.view_as(one))
            self._settle(group, found if isinstance(found, Exception) else None)

        self._executor.begin(group, row, row).add_done_callback(done)

    def _settle(self, group: int, error: Exception | None) -> None:
        """Buckets whose last group this was are done."""
        with self._lock:
            for one in self._buckets:
                one.groups.discard(group)
            ended = [one for one in self._buckets if not one.groups or error]
            self._buckets = [one for one in self._buckets if one.groups and not error]
        for one in ended:
            one.future.set_result(one.buffer if error is None else error)


def apply(ddp: DistributedDataParallel, plan: Plan, deadline: float = DEADLINE) -> Handle:
    """Have ``plan`` synchronise the gradients of ``ddp`` from its next step on. All ranks call it at once.
    ``deadline``: seconds that a collective may take before the step ends with `HostError`.

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
    return Handle(ddp, plan, deadline)


def named(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that DDP synchronises, by their names in its module."""
    ignored = set(ddp.parameters_to_ignore)
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _unfit(ddp: DistributedDataParallel, plan: Plan) -> str:
    """Why the plan is not for this model; "" where it is."""
    world = dist.get_world_size(ddp.process_group)
    if plan.world != world:
        return f"the plan is for {plan.world} ranks, there are {world}"
    if ddp._comm_hooks:
        return "the model has a communication hook already"
    mine = set(named(ddp))
    theirs = [name for group in plan.groups for name in group.tensors]
    if len(set(theirs)) != len(theirs):
        return "the plan names a gradient twice"
    if odd := sorted(mine.symmetric_difference(theirs)):
        where = "plan" if odd[0] in mine else "model"
        return f"the {where} has no gradient {odd[0]!r}; a plan that was made for this model is accepted"
    return ""


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
    return handle._came(bucket)


def _told(outcome: Outcome) -> torch.futures.Future[Tensor]:
    """As DDP takes it: an exception that a callback raises is one that backward ends with."""

    def unwrap(future: Outcome) -> Tensor:
        found = future.value()
        if isinstance(found, Exception):
            raise found
        return found

    return outcome.then(unwrap)


def _future(buffer: Tensor) -> Outcome:
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


def _nbytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


# DDP compares annotations with types, and these are text here
_hook.__annotations__ = {}
