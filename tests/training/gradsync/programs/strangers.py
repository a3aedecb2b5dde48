"""Models and loops that were written without a thought of this, each with a plan applied.

strangers.py models        each trains as under plain DDP with a lossless plan, and learns with a lossy one
strangers.py transformers  Transformers' Trainer and Accelerate, which wrap the model themselves
strangers.py drift         a plan is made anew
strangers.py alone         the only rank there is
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError
from windtunnel.training import gradsync
from windtunnel.training.gradsync.live import drift as drifted
from windtunnel.training.gradsync.live import script
from windtunnel.training.gradsync.live.hook import Handle, apply, named
from windtunnel.training.gradsync.model import (
    PLAIN,
    CodecCost,
    CodecPoint,
    CollectiveFit,
    GradientGroup,
    IterationForecast,
    JobNetwork,
    Kind,
    Option,
    Plan,
    Profile,
)
from windtunnel.training.gradsync.model import GradientTensor as Gradient
from windtunnel.training.gradsync.policy import PAUSE, Keep, Wanted, decide

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


def plan_of(ddp: DistributedDataParallel, option: Option, size: int = 3) -> Plan:
    """Groups of some gradients each in the order of backward; tables by themselves."""
    tables = {f"{name}.weight" for name, one in ddp.module.named_modules() if getattr(one, "sparse", False)}
    groups: list[GradientGroup] = []
    for name in [*named(ddp)][::-1]:
        if name in tables:
            groups.append(GradientGroup((name,), Option("zen", "sparse")))
        elif groups and groups[-1].option == option and len(groups[-1].tensors) < size:
            groups[-1] = GradientGroup((*groups[-1].tensors, name), option)
        else:
            groups.append(GradientGroup((name,), option))
    calls = 2 if option.scheme == "alltoall" else 1
    order = [(place, step) for place in range(len(groups)) for step in range(calls)]
    return Plan(
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
    optimizer = torch.optim.SGD([one for one in ddp.parameters() if one.requires_grad], 0.05)
    losses = []
    for step in range(8 if same else STEPS):
        optimizer.zero_grad()
        for one in range(micro):
            torch.manual_seed((0 if same else 100 * step + one) + 7 * dist.get_rank())
            with ddp.no_sync() if one < micro - 1 else nullcontext():
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
        apply(ddp, Plan(groups, order, (IterationForecast("plan", 1.0, 0),), 1.0, 2, 1))
    except UserError as error:
        assert "the gradient 'bags.0.weight' is sparse" in str(error)
    else:
        raise AssertionError("it was not refused")
    for name, one in strangers.items():
        # of two ranks' gradients there is one sum only, whatever adds them
        ours, theirs = one(option=LOSSLESS), one(option=None)
        assert ours == theirs, (name, ours, theirs)
        for option in LOSSY if name in ("mixed", "clicks") else ():
            losses = one(option=option, same=True)
            assert losses[-1] < losses[0], (name, option, losses)


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
    return [{"input_ids": one, "labels": one} for one in rows]


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
    for one in (trainer, accelerated):
        plain = one()
        handles: list[Handle] = []

        def begin(ddp: DistributedDataParallel, handles: list[Handle] = handles) -> None:
            handles.append(apply(ddp, plan_of(ddp, LOSSLESS, 8), deadline=60.0))

        given = DistributedDataParallel.__init__
        with tempfile.TemporaryDirectory() as folder:
            program, out = Path(folder) / "program.py", Path(folder) / "out.pt"
            program.write_text(
                f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                f"import strangers; torch.save(strangers.{one.__name__}().state_dict(), {str(out)!r})\n"
            )
            script.run([str(program)], begin)
            found = torch.load(out)
        DistributedDataParallel.__init__ = given  # type: ignore[method-assign]
        (handle,) = handles
        assert (handle.since, handle.micro) == ({"trainer": 3, "accelerated": 4}[one.__name__], 2)
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items()), one
        handle.close()


def shrunk(handle: Handle) -> None:
    """What waited on the ranks of a larger world waits on those of this one, none of it twice."""
    torch.manual_seed(3)
    former = [{name: torch.randn(one.numel()) for name, one in named(handle.ddp).items()} for _ in range(3)]
    states = [
        {"world": 3, "rank": rank, "steps": {}, "feedback": {"residuals": former[rank], "momenta": {}}}
        for rank in (2, 0, 1)
    ]
    handle.load_state_dict(states)
    mine = handle.state_dict()
    assert (mine["world"], mine["rank"]) == (2, dist.get_rank())
    for name, one in mine["feedback"]["residuals"].items():
        dist.all_reduce(one)
        assert torch.allclose(one, sum(rank[name] for rank in former), atol=1e-6), name  # type: ignore[arg-type]


def drift() -> None:
    """A network that is told to be slower than it was: the plan for it goes on with what waits."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    names = [*named(ddp)][::-1]
    costs = [CollectiveFit("flat", kind, 1e-4, 1e-9) for kind in get_args(Kind)]
    fast = JobNetwork(1, 2, tuple(costs))
    slow = replace(fast, collectives=tuple(replace(one, per_byte=1e-6) for one in costs))
    codec = CodecCost(
        "dragonn:0.01",
        (CodecPoint(1, 1e-5, 1e-5, 1e-5, 8), CodecPoint(8192, 1e-4, 1e-4, 1e-4, 6600)),
    )
    profile = Profile(
        tuple(Gradient(name, named(ddp)[name].numel(), 1e-4) for name in names), (codec,), fast, 1e-3
    )
    log: list[dict[str, Any]] = []
    handle = apply(
        ddp, gradsync.plan(profile, lossy=True), 60.0, profile=profile,
        event=lambda kind, **fields: log.append(fields), check_every=0,
    )  # fmt: skip

    def steps(count: int) -> None:
        for _ in range(count):
            ddp.zero_grad(set_to_none=True)
            ddp(torch.randn(4, 64)).square().sum().backward()

    def measured(network: JobNetwork) -> Keep:
        steps(PAUSE)
        # the clock of a loaded machine is not what is tested
        handle.seconds.extend([handle.plan.forecasts[0].seconds * (0.5 if network is fast else 50.0)] * 8)
        drifted.network = lambda *_, **__: network  # type: ignore[assignment]
        drifted.codecs = lambda job: job.codecs  # type: ignore[assignment]
        return handle.check()

    assert {one.option.codec for one in handle.plan.groups} == {"none"}
    steps(2)
    assert handle.check().keep
    assert not measured(slow).keep
    assert "dragonn:0.01" in {one.option.codec for one in handle.plan.groups}
    assert (handle.since, handle.pause, len(handle.seconds)) == (0, PAUSE, 0)
    shrunk(handle)
    again = measured(slow)
    assert again.keep and handle.pause == 2 * PAUSE
    waits = handle.state_dict()["feedback"]["residuals"]
    assert any(bool(one.any()) for one in waits.values())
    handle.replace(decide(Wanted(replace(profile, codecs=()))))
    assert handle.state_dict()["feedback"]["residuals"].keys() == waits.keys()
    for name, one in handle.state_dict()["feedback"]["residuals"].items():
        assert torch.equal(one, waits[name])
    plain = DistributedDataParallel(copy.deepcopy(ddp.module))
    batch = torch.randn(4, 64)
    for one in (ddp, plain):
        one.zero_grad(set_to_none=True)
        one(batch).square().sum().backward()
    mean = {name: torch.zeros_like(one) for name, one in named(ddp).items()}
    for name, one in mean.items():
        one.view(-1).add_(waits.get(name, torch.zeros(one.numel())))
        dist.all_reduce(one)
        assert torch.allclose(named(ddp)[name].grad, named(plain)[name].grad + one / 2, atol=1e-5), name  # type: ignore[arg-type, operator]
    assert handle.state_dict()["feedback"]["residuals"] == {}
    shrunk(handle)
    if dist.get_rank() == 0:
        kinds = [one["observation"]["is"] for one in log if "observation" in one]
        assert kinds == ["Drift", "Drift", "Wanted", "Renewed", "Drift", "Wanted", "Renewed"], kinds
    handle.close()
    checked(profile, ddp)


def checked(profile: Profile, ddp: DistributedDataParallel) -> None:
    """A plan is looked at by itself, where a step begins, whatever forwards there are beside."""
    plan, looked = decide(Wanted(profile)), list[int]()
    for other, every in ((profile, 3 + dist.get_rank()), (replace(profile, tensors=profile.tensors[1:]), 3)):
        try:
            apply(ddp, plan, 60.0, profile=other, check_every=every)
        except UserError as error:
            assert "checked every 4" in str(error) or "other gradients" in str(error), error
        else:
            raise AssertionError("it was not refused")
    handle = apply(ddp, plan, 60.0, profile=profile, check_every=3)
    drifted.check = lambda handle: looked.append(handle.since)  # type: ignore[assignment]
    for step in range(1, 8):
        with ddp.no_sync():
            ddp(torch.randn(4, 64)).sum().backward()
        assert looked == [3, 6][: (step - 1) // 3]
        ddp(torch.randn(4, 64)).sum().backward()
        with torch.no_grad():
            ddp(torch.randn(4, 64))
    handle.close()


def alone() -> None:
    """Nothing is sent, so nothing is lost, whatever the plan says."""
    plain = trained(Mixed, text, None, find_unused_parameters=True)
    for option in (LOSSLESS, *LOSSY, Option("dragonn:0.1", "alltoall", "plain")):
        assert trained(Mixed, text, option, find_unused_parameters=True) == plain, option
    assert trained(Clicks, clicks, LOSSLESS) == trained(Clicks, clicks, None)
    ddp = DistributedDataParallel(Mixed(), find_unused_parameters=True)
    profile = gradsync.profile(ddp, lambda: ddp(*text()).backward(), codecs=("fp16",))
    plan = gradsync.plan(profile)
    assert (plan.world, {one.option for one in plan.groups}) == (1, {PLAIN})
    handle = gradsync.apply(ddp, plan, profile=profile)
    assert handle.check().keep
    handle.close()


if __name__ == "__main__":
    {"models": models, "transformers": transformers, "drift": drift, "alone": alone}[sys.argv[1]]()
    dist.destroy_process_group()
