"""What users do beside a plan: hooks of others, other models, and all that can come in another order.

gradsync_neighbours.py hooks   another hook is there before, or comes after
gradsync_neighbours.py closed  a plan is closed twice, and its model is trained on; another plan goes on then
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from gradsync_strangers import LOSSLESS, LOSSY, Clicks, Mixed, clicks, plan_of, text
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.hook import Handle, apply, named
from windtunnel.training.gradsync.model import PLAIN

Batch = Callable[[], tuple[Tensor, ...]]


def wrapped(model: Callable[[], nn.Module], **options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(model(), **options)  # type: ignore[arg-type]


def step(ddp: DistributedDataParallel, batch: Batch, number: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(100 * number + dist.get_rank())
    ddp.zero_grad(set_to_none=True)
    ddp(*batch()).backward()
    gradients = {name: parameter.grad for name, parameter in named(ddp).items() if parameter.grad is not None}
    return {
        name: gradient.coalesce().to_dense() if gradient.is_sparse else gradient.clone()
        for name, gradient in gradients.items()
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


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
            again: Handle = apply(ddp, plan_of(ddp, LOSSLESS), deadline=60.0)
            assert same(step(ddp, batch), step(plain, batch)), (model, option)
            again.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"hooks": hooks, "closed": closed}[sys.argv[1]]()
    dist.destroy_process_group()
