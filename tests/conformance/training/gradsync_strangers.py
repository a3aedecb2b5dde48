"""Models and loops that were written without a thought of this, each with a plan applied.

PROGRAM models        each trains as under plain DDP with a lossless plan, and learns with a lossy one
PROGRAM transformers  Transformers' Trainer and Accelerate, which wrap the model themselves
PROGRAM alone         the only rank there is
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training import gradsync
from windtunnel.training.gradsync.live import script
from windtunnel.training.gradsync.live.hook import Handle, apply, named
from windtunnel.training.gradsync.model import (
    PLAIN,
    GradientGroup,
    IterationForecast,
    Option,
    SyncPlan,
)

if __name__ == "__main__":
    dist.init_process_group("gloo")
torch.set_num_threads(1)
STEPS = 4
Batch = Callable[[], tuple[Any, ...]]


class Mixed(nn.Module):
    """A language model: its head is its embedding, a layer is frozen, matrices are of bfloat16, a norm has
    statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embedding(tokens))
        x = self.norm((x + self.body(x.to(torch.bfloat16)).float()).flatten(0, 1)).unflatten(0, tokens.shape)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Clicks(nn.Module):
    """As DeepFM and DLRM: bags of rows of tables, of which a step meets few, and a small dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(200, 8, mode="sum", sparse=True) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([bag(tokens) for bag in self.bags], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.top(x)[:, 0], y)


def plan_of(ddp: DistributedDataParallel, option: Option, size: int = 3) -> SyncPlan:
    """Groups of some gradients each in the order of backward; tables by themselves."""
    tables = {
        f"{name}.weight" for name, module in ddp.module.named_modules() if getattr(module, "sparse", False)
    }
    groups: list[GradientGroup] = []
    for name in [*named(ddp)][::-1]:
        if name in tables:
            groups.append(GradientGroup((name,), Option("zen", "sparse")))
        elif groups and groups[-1].option == option and len(groups[-1].tensors) < size:
            groups[-1] = GradientGroup((*groups[-1].tensors, name), option)
        else:
            groups.append(GradientGroup((name,), option))
    order = [
        (place, step)
        for place, group in enumerate(groups)
        for step in range(2 if group.option.scheme == "alltoall" else 1)
    ]
    return SyncPlan(
        tuple(groups), tuple(order), (IterationForecast("plan", 1.0, 0),), 1.0, dist.get_world_size(), 1
    )


LOSSLESS = Option("none", "allgather")
LOSSY = (Option("dragonn:0.25", "alltoall"), Option("int8", "allgather"))


def text() -> tuple[Tensor, ...]:
    return (torch.randint(40, (4, 12)),)


def clicks() -> tuple[Tensor, ...]:
    return torch.randint(200, (8, 3)), torch.randint(2, (8,)).float()


def trained(
    model: Callable[[], nn.Module], batch: Batch, option: Option | None, *, micro: int = 1, clip: float = 0.0,
    compiled: bool = False, same: bool = False, **options: Any,
) -> list[float]:  # fmt: skip
    """The losses of some steps; ``option`` None: under plain DDP. ``same``: one batch at each step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model(), **options)
    handle: Handle | None = apply(ddp, plan_of(ddp, option), deadline=60.0) if option else None
    called = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    optimizer = torch.optim.SGD(
        [parameter for parameter in ddp.parameters() if parameter.requires_grad], 0.05
    )
    losses = []
    for step in range(8 if same else STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            torch.manual_seed((0 if same else 100 * step + part) + 7 * dist.get_rank())
            with ddp.no_sync() if part < micro - 1 else nullcontext():
                loss = called(*batch()) / micro
                loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    if handle is not None:
        handle.close()
    return losses


def models() -> None:
    strangers: dict[str, Callable[..., list[float]]] = {
        "mixed": partial(trained, Mixed, text, clip=0.5, micro=2),
        "views": partial(trained, Mixed, text, gradient_as_bucket_view=True),
        "clicks": partial(trained, Clicks, clicks),
        "compiled": partial(trained, Mixed, text, compiled=True),
    }
    ddp = DistributedDataParallel(Clicks())
    groups = tuple(GradientGroup((name,), LOSSLESS) for name in named(ddp))
    order = tuple((place, 0) for place in range(len(groups)))
    try:
        apply(ddp, SyncPlan(groups, order, (IterationForecast("plan", 1.0, 0),), 1.0, 2, 1))
    except UserError as error:
        assert "the gradient 'bags.0.weight' is sparse" in str(error)
    else:
        raise AssertionError("it was not refused")
    for name, losses_of in strangers.items():
        # of two ranks' gradients there is one sum only, whatever adds them
        ours, theirs = losses_of(option=LOSSLESS), losses_of(option=None)
        assert ours == theirs, (name, ours, theirs)
        for option in LOSSY if name in ("mixed", "clicks") else ():
            losses = losses_of(option=option, same=True)
            assert losses[-1] < losses[0], (name, option, losses)
    ddp = DistributedDataParallel(Mixed(), find_unused_parameters=True)
    handle = apply(ddp, plan_of(ddp, LOSSY[0]), deadline=60.0)
    shrunk(handle)
    handle.close()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def sentences() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = torch.randint(60, (32, 8))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer() -> nn.Module:
    from transformers import Trainer, TrainingArguments

    model = bert()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_grad_norm=0.5, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=sentences()).train()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = bert()
    loader = torch.utils.data.DataLoader(sentences(), batch_size=2)  # type: ignore[arg-type]
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


def transformers() -> None:
    """With the plan applied from outside, as `windtunnel gradsync apply` does."""
    for train in (trainer, accelerated):
        plain = train()
        handles: list[Handle] = []

        def begin(ddp: DistributedDataParallel, handles: list[Handle] = handles) -> None:
            handles.append(apply(ddp, plan_of(ddp, LOSSLESS, 8), deadline=60.0))

        given = DistributedDataParallel.__init__
        with tempfile.TemporaryDirectory() as folder:
            program, out = Path(folder) / "program.py", Path(folder) / "out.pt"
            program.write_text(
                f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                f"import gradsync_strangers as job\n"
                f"torch.save(job.{train.__name__}().state_dict(), {str(out)!r})\n"
            )
            script.run([str(program)], begin)
            state = torch.load(out)
        DistributedDataParallel.__init__ = given  # type: ignore[method-assign]
        (handle,) = handles
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items()), train
        handle.close()


def shrunk(handle: Handle) -> None:
    """What waited on the ranks of a larger world waits on those of this one, none of it twice."""
    torch.manual_seed(3)
    former = [
        {name: torch.randn(parameter.numel()) for name, parameter in named(handle.ddp).items()}
        for _ in range(3)
    ]
    states = [{"world": 3, "rank": rank, "steps": 0, "residuals": former[rank]} for rank in (2, 0, 1)]
    handle.load_state_dict(states)
    mine = handle.state_dict()
    assert (mine["world"], mine["rank"]) == (2, dist.get_rank())
    for name, residual in mine["residuals"].items():
        dist.all_reduce(residual)
        assert torch.allclose(residual, sum(rank[name] for rank in former), atol=1e-6), name  # type: ignore[arg-type]


def alone() -> None:
    """Nothing is sent, so nothing is lost, whatever the plan says."""
    plain = trained(Mixed, text, None, find_unused_parameters=True)
    for option in (LOSSLESS, *LOSSY, Option("dragonn:0.1", "alltoall", "plain")):
        assert trained(Mixed, text, option, find_unused_parameters=True) == plain, option
    assert trained(Clicks, clicks, LOSSLESS) == trained(Clicks, clicks, None)
    ddp = DistributedDataParallel(Mixed(), find_unused_parameters=True)
    profile = gradsync.profile(ddp, lambda: ddp(*text()).backward(), codecs=("fp16",))
    plan = gradsync.plan(profile)
    assert (plan.world, {group.option for group in plan.groups}) == (1, {PLAIN})
    gradsync.apply(ddp, plan).close()


if __name__ == "__main__":
    {"models": models, "transformers": transformers, "alone": alone}[sys.argv[1]]()
    dist.destroy_process_group()
