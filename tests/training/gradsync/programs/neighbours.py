"""What users do beside a plan: hooks of others, other models, and all that can come in another order.

neighbours.py hooks   another hook is there before, or comes after
neighbours.py closed  a plan is closed twice, and its model is trained on; another plan goes on then
neighbours.py types   one model has parameters of many types
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from strangers import LOSSLESS, LOSSY, Clicks, Mixed, clicks, plan_of, text
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.hook import Handle, apply, named
from windtunnel.training.gradsync.model import PLAIN, Option

Batch = Callable[[], tuple[Tensor, ...]]


def wrapped(model: Callable[[], nn.Module], **options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(model(), **options)  # type: ignore[arg-type]


def step(ddp: DistributedDataParallel, batch: Batch, number: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(100 * number + dist.get_rank())
    ddp.zero_grad(set_to_none=True)
    ddp(*batch()).backward()
    found = {name: one.grad for name, one in named(ddp).items() if one.grad is not None}
    return {name: one.coalesce().to_dense() if one.is_sparse else one.clone() for name, one in found.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refused(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except UserError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("it was not refused")


def hooks() -> None:
    ddp = wrapped(Mixed)
    ddp.register_comm_hook(None, fp16_compress_hook)
    refused(lambda: apply(ddp, plan_of(ddp, LOSSLESS), deadline=60.0), "hook already (fp16_compress_hook)")
    # which PyTorch has in C++, and which would have been dropped without a word
    built_in = wrapped(Mixed)
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for option in (LOSSLESS, PLAIN):
        refused(lambda: apply(built_in, plan_of(built_in, option), deadline=60.0), "FP16_COMPRESS")  # noqa: B023
    # DDP takes one hook only, and says so; beside a plan that leaves gradients alone there is none
    late = wrapped(Mixed)
    handle = apply(late, plan_of(late, LOSSY[0]), deadline=60.0)
    refused(lambda: apply(late, plan_of(late, LOSSY[0]), deadline=60.0), "hook already (of another plan)")
    try:
        late.register_comm_hook(None, fp16_compress_hook)
    except RuntimeError as error:
        assert "can only be called once" in str(error)
    else:
        raise AssertionError("it was not refused")
    handle.close()
    beside = wrapped(Mixed)
    handle = apply(beside, plan_of(beside, PLAIN), deadline=60.0)
    beside.register_comm_hook(beside.process_group, allreduce_hook)
    step(beside, text)
    refused(lambda: handle.replace(plan_of(beside, LOSSY[0])), "allreduce_hook")
    handle.close()


def closed() -> None:
    cases: tuple[tuple[Callable[[], nn.Module], Batch], ...] = ((Mixed, text), (Clicks, clicks))
    for model, batch in cases:
        for option in (LOSSY[0], PLAIN):
            ddp, plain = wrapped(model), wrapped(model)
            handle = apply(ddp, plan_of(ddp, option), deadline=60.0)
            step(ddp, batch)
            with ddp.no_sync():
                torch.manual_seed(5)
                ddp(*batch()).backward()
            waits = handle.state_dict()  # in the midst of what is accumulated
            handle.load_state_dict(waits)
            torch.manual_seed(6)
            ddp(*batch()).backward()
            waits = handle.state_dict()
            for _ in range(2):
                handle.close()
            assert str(handle.state_dict()) == str(waits)
            for number in range(2):
                assert same(step(ddp, batch, number), step(plain, batch, number)), (model, option)
            refused(lambda: handle.replace(plan_of(ddp, PLAIN)), "it is closed")  # noqa: B023
            again: Handle = apply(ddp, plan_of(ddp, LOSSLESS), deadline=60.0)
            assert same(step(ddp, batch), step(plain, batch)), (model, option)
            again.close()


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.bfloat = nn.Linear(16, 16).to(torch.bfloat16)
        self.two = nn.Linear(16, 16).double()
        self.three = nn.Linear(16, 4).half()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bfloat(self.one(x).tanh().bfloat16()).tanh()
        x = self.two(x.double()).tanh()
        return (self.three(x.half()).float() + self.last(x.float())).square().mean()


def types() -> None:
    """Two models in one backward, each with its own plan; groups have gradients of several types."""

    def losses(first: Option | None, second: Option | None) -> list[float]:
        models = [wrapped(Many, find_unused_parameters=True) for _ in range(2)]
        handles = [
            apply(ddp, plan_of(ddp, option), deadline=60.0)
            for ddp, option in zip(models, (first, second), strict=True)
            if option is not None
        ]
        optimizer = torch.optim.SGD([one for ddp in models for one in ddp.parameters()], 0.1)
        found = []
        for _ in range(6):
            torch.manual_seed(dist.get_rank())
            optimizer.zero_grad()
            batch = torch.randn(8, 16)
            loss = models[0](batch) + models[1](batch)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        for handle in handles:
            handle.close()
        return found

    plain = losses(None, None)
    assert losses(LOSSLESS, LOSSLESS) == plain
    for option in (*LOSSY, Option("dragonn:0.1", "alltoall"), Option("fp16")):
        lossy = losses(option, LOSSLESS)
        assert lossy[-1] < lossy[0], (option, lossy)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"hooks": hooks, "closed": closed, "types": types}[sys.argv[1]]()
    dist.destroy_process_group()
