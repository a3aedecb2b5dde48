"""A small model under DDP, whose gradients a plan synchronises: one group for each option there is.

hooked.py options    every option gives what its codecs stand for, and nothing is lost on the way
hooked.py refused    ranks that differ, and plans of other models
hooked.py lost       a rank is stopped, or dies
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live import executor
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.hook import apply, named
from windtunnel.training.gradsync.model import PLAIN, GradientGroup, IterationForecast, Option, SyncPlan

dist.init_process_group("gloo")
torch.set_num_threads(1)
RANK, WORLD = dist.get_rank(), dist.get_world_size()
HOSTS, STEPS = 2, 3
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True},
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return x.sum() + self.empty.sum()


def model_of(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), **options)


def plan_of(ddp: DistributedDataParallel, *options: Option, seed: int = 0) -> SyncPlan:
    """Groups of two gradients each, in the order of backward, with ``options`` in turn."""
    names = [*named(ddp)][::-1]
    cut = [tuple(names[i : i + 2]) for i in range(0, len(names), 2)]
    groups = tuple(GradientGroup(pair, options[place % len(options)]) for place, pair in enumerate(cut))
    order = []
    for place, group in enumerate(groups):
        scheme, inside = group.option.scheme, group.option.inside
        calls = 2 if scheme == "alltoall" else 1
        calls += 2 * (inside != "flat")
        order += [(place, step) for step in range(calls)]
    return SyncPlan(groups, tuple(order), (IterationForecast("plan", 1.0, 0),), 1.0, WORLD, HOSTS, seed)


def gradients(ddp: DistributedDataParallel, step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * step + RANK)
    ddp.zero_grad(set_to_none=True)
    ddp(torch.randn(8, 24)).backward()
    return {name: parameter.grad.clone() for name, parameter in named(ddp).items()}  # type: ignore[union-attr]


def same_everywhere(sums: dict[str, torch.Tensor]) -> bool:
    gathered: list[object] = [None] * WORLD
    dist.all_gather_object(gathered, [gradient.tolist() for gradient in sums.values()])
    return all(str(reported) == str(gathered[0]) for reported in gathered)


def options() -> None:
    """What was sent over some steps, alike on all ranks, and what still waits are what backward made."""
    plain = model_of()
    truth = [gradients(plain, step) for step in range(STEPS)]
    every = [
        Option(codec, scheme, inside)  # type: ignore[arg-type]
        for codec, scheme in (
            ("none", "allreduce"), ("fp16", "allreduce"), ("int8", "allgather"), ("dragonn:0.3", "alltoall"),
        )
        for inside in ("flat", "plain", "coded")
        if not (inside == "coded" and scheme == "allreduce")
    ]  # fmt: skip
    every += [Option("none", "allgather")]
    for place, option in enumerate(every):
        ddp = model_of(**WAYS[place % len(WAYS)])
        handle = apply(ddp, plan_of(ddp, option, PLAIN), deadline=60.0)
        sent: dict[str, torch.Tensor] = {}
        for step, dense in enumerate(truth):
            sums = gradients(ddp, step)
            assert same_everywhere(sums), option
            for name, gradient in sums.items():
                sent[name] = sent.get(name, 0) + gradient
                if option.codec == "none":
                    assert torch.allclose(gradient, dense[name], atol=1e-6)
        states: list[dict[str, dict[str, torch.Tensor]]] = [{}] * WORLD
        dist.all_gather_object(states, handle.state_dict())
        for name, total in sent.items():
            if not total.numel():
                continue
            rests = [state["residuals"] for state in states]
            waiting = sum(rest.get(name, torch.zeros(total.numel())) for rest in rests).view_as(total) / WORLD
            whole = sum(dense[name] for dense in truth)
            gap = float((total + waiting - whole).abs().max())
            assert gap <= (2e-3 if option.codec == "fp16" else 1e-4) * (1 + float(whole.abs().max())), (
                option,
                name,
            )
        again = model_of()
        other = apply(again, plan_of(again, option, PLAIN), deadline=60.0)
        other.load_state_dict(handle.state_dict())
        assert str(other.state_dict()) == str(handle.state_dict())
        ours, theirs = gradients(ddp, STEPS), gradients(again, STEPS)
        assert option.codec in ("none", "fp16") or all(
            torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours
        ), option
        handle.close()
        other.close()
    not_numbers()


def not_numbers() -> None:
    """One rank's NaN is seen by all, and the step after it is as if it had not been."""
    ddp = model_of()
    handle = apply(
        ddp, plan_of(ddp, Option("dragonn:0.1", "allgather"), Option("sign", "alltoall")), deadline=60.0
    )
    gradients(ddp, 0)
    waits = str(handle.state_dict()["residuals"])
    ddp.zero_grad(set_to_none=True)
    (ddp(torch.randn(8, 24)) * (float("nan") if RANK == 1 else 1.0)).backward()
    # a code has room for some of them in each group
    for group in handle.plan.groups:
        members = [named(ddp)[name] for name in group.tensors if named(ddp)[name].numel()]
        assert not members or any(member.grad.isnan().any() for member in members), group  # type: ignore[union-attr]
    if RANK == 1:
        assert str(handle.state_dict()["residuals"]) == waits
    assert all(gradient.isfinite().all() for gradient in gradients(ddp, 1).values())
    handle.close()


def refused() -> None:
    def attempt(plan: SyncPlan, ddp: DistributedDataParallel) -> None:
        try:
            apply(ddp, plan, deadline=20.0)
        except UserError as error:
            if RANK == 0:
                print(error, flush=True)
        else:
            raise AssertionError("it was not refused")

    ddp = model_of()
    attempt(plan_of(ddp, Option("int8", "allgather"), seed=RANK // 2), ddp)
    fit = plan_of(ddp, PLAIN)
    attempt(replace(fit, groups=fit.groups[1:]), ddp)
    attempt(replace(fit, world=WORLD + 1), ddp)
    attempt(replace(fit, groups=(*fit.groups, fit.groups[0])), ddp)
    attempt(replace(fit, numel=7), ddp)
    damaged()


def damaged() -> None:
    """States that are not one of this model's ranks are refused, and what waits still does."""
    ddp = model_of()
    handle = apply(ddp, plan_of(ddp, Option("int8", "allgather")), deadline=20.0)
    gradients(ddp, 0)
    assert not handle.saved  # which jobs look for by its name
    state = handle.state_dict()
    assert handle.saved
    before = str(state)
    for wrong in (
        [], [state], [state] * WORLD, {**state, "world": WORLD + 1},
        {**state, "residuals": {"gone": torch.zeros(3)}},
        {"world": WORLD, "rank": 0, "steps": {}, "feedback": {"residuals": {}}},
    ):  # fmt: skip
        try:
            handle.load_state_dict(wrong)  # type: ignore[arg-type]
        except UserError as error:
            assert str(error).count("\n") == 0
        else:
            raise AssertionError(wrong)
        assert str(handle.state_dict()) == before
    handle.close()


class Strikes(torch.autograd.Function):
    """In backward, the last rank does ``strike`` to itself."""

    strike: Callable[[], object] | None = None

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0

    @staticmethod
    def backward(ctx: object, *given: torch.Tensor) -> torch.Tensor:
        if RANK == WORLD - 1 and Strikes.strike is not None:
            Strikes.strike()
        return given[0]


class Struck(Net):
    """In the midst of a step, when its last layers are under way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.relu(layer(Strikes.apply(x) if place == 2 else x)) * self.scale  # type: ignore[no-untyped-call]
        return x.sum() + self.empty.sum()


def failing(ddp: DistributedDataParallel) -> None:
    """Every further step ends, and says why."""
    for step in range(2):
        try:
            gradients(ddp, step)
        except RuntimeError as error:
            print(f"rank {RANK}: {error}".splitlines()[0], flush=True)
        else:
            raise AssertionError("it went on")


def lost() -> None:
    """A rank is stopped in the midst of a step, and continued: all go on as if it had not been. It is stopped
    for longer than the deadline, and it dies: the others' backward ends and says so, and its own, if it goes
    on."""
    options = Option("dragonn:0.1", "alltoall"), Option("int8", "allgather"), PLAIN
    pids = Peers().gather(os.getpid())

    def stop() -> None:
        """Once."""
        Strikes.strike = None
        os.kill(os.getpid(), signal.SIGSTOP)

    def struck() -> DistributedDataParallel:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Struck())
        apply(ddp, plan_of(ddp, *options), deadline=60.0)
        for step in range(2):  # DDP has its final buckets in the third
            gradients(ddp, step)
        return ddp

    def go_on() -> None:
        """As soon as it is stopped."""
        while Path(f"/proc/{pids[-1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        os.kill(pids[-1], signal.SIGCONT)

    Strikes.strike = None
    whole, ddp = gradients(struck(), 2), struck()
    Strikes.strike = stop
    if RANK == 0:
        threading.Thread(target=go_on).start()
    assert str(gradients(ddp, 2)) == str(whole)
    Strikes.strike = stop
    executor.Peers = lambda group, _: Peers(group, 1.0)  # type: ignore[assignment, misc]
    failing(ddp)
    if RANK == 0:
        go_on()
    executor.Peers = Peers  # type: ignore[misc]
    ddp = struck()
    Strikes.strike = partial(os._exit, 0)
    failing(ddp)
    os._exit(0)


{"options": options, "refused": refused, "lost": lost}[sys.argv[1]]()
dist.destroy_process_group()
