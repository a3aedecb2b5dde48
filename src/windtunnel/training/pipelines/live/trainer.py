"""A pipeline-parallel trainer that goes on, on the hosts that are left, after losing some.

    def train(job):
        trainer = job.keep("trainer", lambda: PipelineTrainer(layers, …))
        return trainer.fit(job, steps=1000)

    elastic.run(train)

`fit` is called again, in the same process, whenever the membership changed. The trainer keeps the state of
its layers meanwhile. Coming into a generation (`entry`), all hosts tell each other what they hold, settle
the step in doubt (`commit`), find the same new layout by the same policy, and copy the layers that a host
now needs from those that have them (`layers`). Then they go on with the step after the last one committed:

1. each pipeline runs its share of the microbatches by 1F1B (`planner`, `stage`);
2. gradients are summed layer by layer over the hosts that hold the layer (`team`), the losses, the
   gradients' norms and whether anything went wrong over all hosts;
3. all agree that the step is prepared: the commit record;
4. each applies the step to its layers.

A failure before 3 is done discards the step, which is then done again with the same samples; one after it
finds the step committed. Either way nothing is lost. With ``reduction="fixed"`` the run
ends with the same bits as one without failures. (Oobleck, Jang et al., SOSP 2023.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint import store
from windtunnel.training.elastic import determinism
from windtunnel.training.elastic.determinism import seed_for, seed_generators
from windtunnel.training.pipelines.live import entry
from windtunnel.training.pipelines.live.layers import (
    HostLayer,
    LayerSpec,
    MakeOptimizer,
    MakeScheduler,
    shard_of,
)
from windtunnel.training.pipelines.live.stage import InFlight, LiveStage, Loss, StageExchange
from windtunnel.training.pipelines.live.team import SCALE, Reduction, Sums, Team
from windtunnel.training.pipelines.model import Layout, TemplateSet
from windtunnel.training.pipelines.policy.commit import commit_key
from windtunnel.training.pipelines.policy.planner import one_forward_one_backward

if TYPE_CHECKING:
    from windtunnel.training.elastic import Job


@dataclass(frozen=True)
class SampleOrder:
    """``samples`` in the data set, ``microbatches`` of ``size`` samples in a step."""

    samples: int
    microbatches: int
    size: int
    seed: int

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """The indices of the samples of one microbatch (0-based) of ``step`` (0-based)."""
        begin = (step * self.microbatches + microbatch) * self.size
        return determinism.samples(self.seed, self.samples, begin, self.size)


Batch = Callable[[list[int]], tuple[Any, Any]]


@dataclass(frozen=True)
class Prepared:
    """What is applied when the step is committed. ``gradients``: flat, by layer; empty where the step is
    skipped. ``norm``: of all gradients, before clipping."""

    step: int
    gradients: dict[int, Tensor]
    loss: float
    norm: float
    skipped: bool


class PipelineTrainer:
    """Trains ``layers``, one after the other, on as many hosts as there are.

    ``optimizer``: called with the parameters of one layer; each layer has its own. ``scheduler``: likewise
    with that optimizer; it advances once a committed step. ``loss``: of the last layer's output and the
    target, a mean over the microbatch. ``batch``: (input, target) of the samples with these indices, the same
    wherever it is called; torch's random numbers are seeded before. ``samples``: how many there are.
    ``microbatches`` of ``microbatch_size`` samples make a step.

    ``templates``: how to cut the layers over so and so many hosts, for one device a host
    (`policy.templates.template_set`, `even_templates`). ``search``: as in `policy.reconfigure.reconfigure`.

    ``reduction``, ``scale``: see `team`. ``max_norm``: gradients are scaled down to this norm over all
    layers. ``nonfinite``: "raise", or "skip" a step whose gradients are no numbers (it counts as a step, and
    the scheduler advances). ``autocast``: the dtype that layers compute in, e.g. torch.bfloat16.

    ``checkpoint``: a folder that all hosts see, or a URL; layers are written there every
    ``checkpoint_every`` steps, the ``keep`` newest steps are kept. Needed only when the last copy of a layer
    is lost, or all hosts.

    Raises:
        UserError: a value is not accepted.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        optimizer: MakeOptimizer,
        loss: Loss,
        batch: Batch,
        *,
        samples: int,
        microbatches: int,
        microbatch_size: int,
        templates: TemplateSet,
        reduction: Reduction = "float",
        scale: float = SCALE,
        seed: int = 0,
        scheduler: MakeScheduler | None = None,
        max_norm: float | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
        autocast: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 0,
        keep: int = 2,
        search: bool = True,
    ) -> None:
        self.specs = list(layers)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.loss, self.batch = loss, batch
        self.templates = templates
        self.reduction, self.scale = reduction, scale
        self.seed = seed
        self.max_norm, self.nonfinite, self.autocast = max_norm, nonfinite, autocast
        self.device = torch.device(device)
        self.checkpoint = None if checkpoint is None else str(checkpoint)
        self.checkpoint_every, self.keep = checkpoint_every, keep
        self.search = search
        self.order = SampleOrder(samples, microbatches, microbatch_size, seed)
        _check(self)
        # What lives over regroupings:
        self.layers: dict[int, HostLayer] = {}
        self.version = 0
        self.era = 0
        self.before = 0  # the newest generation that was in storage when the job began or went back there
        self.pending: Prepared | None = None
        self.layout: Layout | None = None
        self.since = 0
        self.losses: dict[int, float] = {}
        self._calls = (0, 0)

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    def build(self, index: int) -> HostLayer:
        """Layer ``index`` as it is before the first step: the same on every host."""
        spec = self.specs[index]
        return HostLayer(index, spec, self.seed, self.optimizer, self.scheduler, self.device)

    def settings(self) -> str:
        """Digest of what must be the same on all hosts."""
        text = json.dumps(
            [
                self.names, self.reduction, self.scale, self.seed, self.max_norm, self.nonfinite,
                str(self.autocast), self.order.samples, self.order.microbatches, self.order.size,
                asdict(self.templates), self.checkpoint, self.checkpoint_every,
            ]
        )  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fit(
        self, job: Job, steps: int, on_step: Callable[[int, float], object] | None = None
    ) -> dict[str, Any]:
        """Train until ``steps`` steps are applied, counted from the beginning of the job.

        ``on_step``: called in every process with the number of a step (from 0) and its loss, once it is
        applied.

        The result: ``steps``; ``hashes`` of all layers' states (parameters, optimizer, scheduler), by name;
        ``losses`` by step, those that this process has seen.

        Raises:
            LayersLost: the last copy of a layer is gone, and no checkpoint helps.
            OverflowError: a gradient was too large for the fixed-point sum.
            FloatingPointError: a gradient was no number.
            UserError: the hosts do not agree in their settings, or are too few.
        """
        calls = self._calls[1] + 1 if self._calls[0] == job.generation else 1
        self._calls = (job.generation, calls)
        prefix = f"pipelines/{calls}"
        team = entry.enter(self, job, prefix)
        exchange = StageExchange(team.before, team.after, self.device)
        while self.version < steps:
            step = self.version
            self.pending = self._prepare(team, exchange, step)
            job.guarantee(self._doubts(), any_world=True)
            job.at("before_commit", step)
            job.agree(commit_key(self.era, step))
            job.at("after_ack", step)
            job.at("before_apply", step)
            prepared = self.apply()
            if on_step is not None:
                on_step(step, prepared.loss)
            job.step(step, loss=prepared.loss, gradient_norm=prepared.norm, skipped=prepared.skipped)
            if self.checkpoint and self.checkpoint_every and self.version % self.checkpoint_every == 0:
                self._save(job, team, prefix)
        return self._finish(job, prefix)

    def _doubts(self) -> list[str]:
        return ["with reduction='float' a sum depends on the layout"] if self.reduction == "float" else []

    def apply(self) -> Prepared:
        """Apply the prepared step, which is committed, to all layers that have not seen it."""
        assert self.pending is not None
        prepared = self.pending
        coefficient = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (prepared.norm + 1e-6))
        for index, layer in self.layers.items():
            if layer.version == prepared.step:
                gradient = prepared.gradients.get(index)
                layer.apply(
                    gradient if gradient is None or coefficient == 1.0 else gradient.mul_(coefficient)
                )
        self.version = prepared.step + 1
        self.losses[prepared.step] = prepared.loss
        self.pending = None
        return prepared

    def _prepare(self, team: Team, exchange: StageExchange, step: int) -> Prepared:
        sums = Sums(self.reduction, team.groups, self.order.microbatches, self.scale)
        # One sum over all hosts, in which each entry has one contributor: exact in any order.
        losses = torch.zeros(self.order.microbatches, dtype=torch.float64)
        squares = torch.zeros(len(self.specs), dtype=torch.float64)
        gradients: dict[int, Tensor] = {}
        if team.stage is not None:
            self._run_pipeline(team, exchange, sums, step, losses)
            for index in reversed(team.layers):
                layer = self.layers[index]
                if layer.parameters:
                    gradients[index] = sums.finish(layer)
                    if team.pipeline == 0:
                        squares[index] = gradients[index].double().square_().sum().cpu()
        flags = torch.tensor([sums.overflow, sums.nonfinite], dtype=torch.float64)
        tensor = torch.cat([losses, squares, flags])
        if team.world > 1:
            dist.all_reduce(tensor)
        losses, squares, flags = tensor.split([len(losses), len(squares), 2])
        loss = sum(losses.tolist()) / self.order.microbatches
        norm = math.sqrt(sum(squares.tolist())) if bool((squares >= 0).all()) else math.nan
        overflow, nonfinite = (bool(flag) for flag in flags.tolist())
        if overflow:
            raise OverflowError(
                f"step {step}: a gradient is too large for fixed-point sums of {self.order.microbatches}"
                f" microbatches with a scale of {self.scale:g}; at most"
                f" {2.0**62 / self.scale / self.order.microbatches:g} is accepted: choose a smaller scale,"
                " or reduction='float'"
            )
        skipped = nonfinite or not math.isfinite(norm)
        if skipped and self.nonfinite == "raise":
            bad = [name for name, square in zip(self.names, squares.tolist(), strict=True) if not square >= 0]
            where = f" of {', '.join(bad)}" if bad else ""
            raise FloatingPointError(f"step {step}: gradients{where} are no finite numbers (loss {loss})")
        return Prepared(step, {} if skipped else gradients, loss, norm, skipped)

    def _run_pipeline(
        self, team: Team, exchange: StageExchange, sums: Sums, step: int, losses: Tensor
    ) -> None:
        assert team.stage is not None
        first, last = team.before is None, team.after is None
        stages = len(team.layout.pipelines[team.pipeline or 0])
        actions = one_forward_one_backward(team.stage, stages, len(team.microbatches))
        stage = LiveStage([self.layers[index] for index in team.layers], self.seed, self.autocast)
        flights: dict[int, InFlight] = {}
        left = len(team.microbatches)
        for number, action in enumerate(actions):
            if number + 1 < len(actions):
                following = actions[number + 1]
                exchange.expect(following.kind, team.microbatches[following.microbatch])
            m = team.microbatches[action.microbatch]
            if action.kind == "forward":
                inputs, target = self._load(step, m) if first or last else ((), None)
                flight = stage.forward(step, m, inputs if first else exchange.activations(m))
                if last:
                    losses[m] = stage.loss(flight, target, self.loss)
                else:
                    exchange.send_activations(m, flight.layers[-1].outputs)
                flights[m] = flight
            else:
                left -= 1
                done = left == 0

                def sink(layer: HostLayer, tensors: list[Tensor], done: bool = done) -> None:
                    sums.add(layer, tensors)
                    if done:
                        sums.start(layer)

                gradients = [] if last else exchange.gradients(m)
                back = stage.backward(flights.pop(m), gradients, sink, 1.0 / self.order.microbatches)
                if not first:
                    exchange.send_gradients(m, back)
        exchange.finish()

    def _load(self, step: int, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        seed_generators(seed_for(self.seed, step, microbatch, len(self.specs)))
        inputs, target = self.batch(self.order.microbatch(step, microbatch))
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return tuple(t.to(self.device) for t in inputs), _moved(target, self.device)

    def _save(self, job: Job, team: Team, prefix: str) -> None:
        assert self.checkpoint is not None
        job.at("before_persist", self.version)
        pipelines = len(team.layout.pipelines)
        # Each layer is written by one of its holders, a different pipeline's in turn.
        wholes = {
            shard_of(index): self.layers[index].pack()
            for index in team.layers
            if index % pipelines == team.pipeline
        }
        key = f"{prefix}/{self.version}"
        generation = self.before + job.generation
        store(job, self.checkpoint, self.version, wholes, len(self.specs), key, generation, self.keep)

    def _finish(self, job: Job, prefix: str) -> dict[str, Any]:
        mine = {layer.name: layer.digest() for layer in self.layers.values()}
        hashes: dict[str, str] = {}
        for rank, digests in sorted(job.agree(f"{prefix}/finished", mine).items()):
            for name, digest in digests.items():
                if hashes.setdefault(name, digest) != digest:
                    raise RuntimeError(f"layer {name}: the copy of rank {rank} differs from the others")
        ordered = {name: hashes[name] for name in self.names}
        return {"steps": self.version, "hashes": ordered, "losses": dict(self.losses)}


def _moved(target: Any, device: torch.device) -> Any:
    if isinstance(target, Tensor):
        return target.to(device)
    if isinstance(target, (tuple, list)):
        return type(target)(_moved(part, device) for part in target)
    return target


def _check(trainer: PipelineTrainer) -> None:
    names, order = trainer.names, trainer.order
    if not names or len(set(names)) != len(names):
        raise UserError(f"layers {names}: accepted: one or more, with different names")
    if trainer.reduction not in ("float", "fixed"):
        raise UserError(f"reduction {trainer.reduction!r}; accepted: 'float', 'fixed'")
    if trainer.nonfinite not in ("raise", "skip"):
        raise UserError(f"nonfinite {trainer.nonfinite!r}; accepted: 'raise', 'skip'")
    for what, value in (
        ("samples", order.samples), ("microbatches", order.microbatches), ("microbatch_size", order.size),
        ("scale", trainer.scale),
    ):  # fmt: skip
        if not value > 0:
            raise UserError(f"{what} is {value}; accepted: a positive number")
    for template in trainer.templates.templates:
        if template.stages[-1].last != len(names):
            raise UserError(
                f"the template for {template.hosts} hosts is for {template.stages[-1].last} layers;"
                f" the model has {len(names)}"
            )
