"""Coming into a generation: who holds what, which layout follows, and the copies that lead to it.

All hosts do the same calculation on the same data, which they agree on over the control plane:

1. each says what it holds, which step it has prepared, and which layout it knows (`commit.Standing`);
2. the step in doubt is settled: those who prepared it apply it, or all drop it;
3. the newest layout that anybody knows, less the hosts that are gone, plus those that came, gives the new
   one (`policy.decide`);
4. layers go to where they are needed now. A layer that nobody holds is built anew if no step was applied yet;
   else all go back to the newest checkpoint that can be read whole, or the job ends with the layer's name;
5. when all have what they need they say so, and what is not needed any more is dropped: a failure before
   that leaves every layer where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.store import eventlog
from windtunnel.training.checkpoint import Whole
from windtunnel.training.checkpoint.model import StoredStep
from windtunnel.training.pipelines.live.layers import copy_layers, plan_transfers, read_layer, saved_steps
from windtunnel.training.pipelines.live.team import Team, assigned, make_team
from windtunnel.training.pipelines.model import Layout, Reconfiguration
from windtunnel.training.pipelines.policy import Decision, HostsChanged, InDoubt, Observation, decide
from windtunnel.training.pipelines.policy.commit import Resolution, Standing, commit_key

if TYPE_CHECKING:
    from windtunnel.training.elastic import Job
    from windtunnel.training.pipelines.live.trainer import PipelineTrainer


class LayersLost(RuntimeError):
    """The last copy of a layer is gone, and there is no checkpoint to go back to."""


def enter(trainer: PipelineTrainer, job: Job, prefix: str) -> Team:
    """Bring ``trainer`` into the job's generation; its part in it. ``prefix``: of the keys to agree on.

    Raises:
        LayersLost: a layer is gone for good.
        UserError: the hosts are too few, or do not agree in their settings.
    """
    begin = time.monotonic()
    standings = _meet(trainer, job, prefix)
    resolution = _decided(trainer, job, InDoubt(standings, len(trainer.specs)))
    assert isinstance(resolution, Resolution)
    _settle(trainer, job, standings, resolution)
    ranks = {standing.host: rank for rank, standing in standings.items()}
    nbytes = _sizes(standings)
    layout, how = _layout(trainer, job, standings, nbytes)
    needed = assigned(trainer.templates, layout, ranks)
    trainer.layout, trainer.since = layout, job.generation
    job.at("restoring")
    tier = "memory"
    lost = [index for index, holders in resolution.holders.items() if not holders]
    moved, copied = 0, 0.0
    if resolution.version is None or (lost and resolution.version > 0):
        names = [trainer.names[index] for index in lost]
        tier = _go_back(trainer, job, prefix, resolution, needed.get(job.rank, ()), names)
    else:
        trainer.version, trainer.era = resolution.version, resolution.era
        transfers = plan_transfers(needed, resolution.holders, nbytes)
        moved, copied = len(transfers), sum(transfer.nbytes for transfer in transfers)
        received = copy_layers(transfers, trainer.layers, job.rank)
        for index, whole in received.items():
            _take(trainer, index, whole)
            tier = "peer"
        for index in needed.get(job.rank, ()):
            if index in lost:  # no step was applied yet
                trainer.layers[index] = trainer.build(index)
    mark = hashlib.sha256(json.dumps(asdict(layout)).encode()).hexdigest()
    marks = job.agree(f"{prefix}/restored", [mark, trainer.version, trainer.era])
    if len({tuple(mark) for mark in marks.values()}) > 1:
        raise RuntimeError(f"the hosts came to different layouts or steps: {marks}")
    for index in set(trainer.layers) - set(needed.get(job.rank, ())):
        del trainer.layers[index]
    team = make_team(trainer.templates, layout, ranks, job.rank)
    layers = sorted(trainer.layers)
    job.event("restored", step=trainer.version, tier=tier, seconds=time.monotonic() - begin, layers=layers)
    if job.rank == 0:
        job.event(
            "layout", how=how, pipelines=layout.pipelines, microbatches=layout.microbatches,
            moved=moved, nbytes=copied, step=trainer.version,
        )  # fmt: skip
    return team


def _meet(trainer: PipelineTrainer, job: Job, prefix: str) -> dict[int, Standing]:
    if job.world > 1 and "gloo" not in str(dist.get_backend_config()):
        raise UserError(
            f"the process group's backend is {dist.get_backend_config()}; accepted: one with gloo for tensors"
            ' of the CPU: elastic.run(train, backend="gloo")'
        )
    pending = trainer.pending.step if trainer.pending else None
    mine = Standing(
        # Without a supervisor nothing fails alone, and each rank counts as a host.
        host=job.host if job.supervised else job.rank,
        era=trainer.era,
        versions={index: layer.version for index, layer in trainer.layers.items()},
        nbytes={index: layer.nbytes() for index, layer in trainer.layers.items()},
        pending=pending,
        committed=pending is not None and job.decided(commit_key(trainer.era, pending)) is not None,
        layout=trainer.layout,
        since=trainer.since,
        settings=trainer.settings(),
    )
    answers = job.agree(f"{prefix}/standing", to_plain(mine))
    standings = {rank: from_plain(Standing, answers[rank]) for rank in sorted(answers)}
    settings = {standing.settings for standing in standings.values()}
    if len(settings) > 1:
        raise UserError("the hosts run trainers with different settings; accepted: the same on all")
    if len({standing.host for standing in standings.values()}) < len(standings):
        raise UserError("there are several ranks on a host; accepted: one (--per-host 1)")
    return standings


def _settle(
    trainer: PipelineTrainer, job: Job, standings: Mapping[int, Standing], resolution: Resolution
) -> None:
    """Apply the step in doubt or drop it, as all others do."""
    ready = [
        rank
        for rank, standing in standings.items()
        if standing.era == resolution.era and standing.pending is not None
        and standing.pending == resolution.apply
    ]  # fmt: skip
    if job.rank in ready:
        prepared = trainer.apply()
        if job.rank == ready[0]:
            # Whoever reports steps may be gone; a step may be reported twice.
            job.event("step", step=prepared.step, loss=prepared.loss, gradient_norm=prepared.norm)
    trainer.pending = None


def _sizes(standings: Mapping[int, Standing]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for standing in standings.values():
        for index, nbytes in standing.nbytes.items():
            sizes[index] = max(sizes.get(index, 0), nbytes)
    return sizes


def _layout(
    trainer: PipelineTrainer, job: Job, standings: Mapping[int, Standing], nbytes: Mapping[int, int]
) -> tuple[Layout, str]:
    """The layout for the hosts that are here, by the pure policy; and how it came about."""
    with_layout = [standing for standing in standings.values() if standing.layout is not None]
    # A recovery may have been broken off: not everybody knows the newest.
    newest = max(with_layout, key=lambda standing: standing.since, default=None)
    changed = HostsChanged(
        templates=trainer.templates,
        before=newest.layout if newest else None,
        present=tuple(standing.host for _, standing in sorted(standings.items())),
        microbatches=trainer.order.microbatches,
        layer_bytes=tuple(float(nbytes.get(index, 0)) for index in range(len(trainer.specs))),
        search=trainer.search,
    )
    decision = _decided(trainer, job, changed)
    assert isinstance(decision, Reconfiguration)
    if not decision.layout.pipelines:
        count, least = len(changed.present), trainer.templates.n0
        raise UserError(f"{count} hosts are left; the model needs {least} (the smallest template)")
    return decision.layout, decision.how


def _decided(trainer: PipelineTrainer, job: Job, observation: Observation) -> Decision:
    """All decide alike; one says it in the run's events."""
    decision = decide(observation)
    if job.rank == 0:
        policy = "search" if trainer.search else "local"
        job.event("decision", **eventlog.decided("training.pipelines", policy, observation, decision))
    return decision


def _key(saved: StoredStep) -> str:
    return f"{saved.step}-{saved.generation}-{saved.check}"


def _take(trainer: PipelineTrainer, index: int, whole: Whole) -> None:
    layer = trainer.layers.get(index) or trainer.build(index)
    layer.unpack(whole)
    trainer.layers[index] = layer


def _go_back(
    trainer: PipelineTrainer,
    job: Job,
    prefix: str,
    resolution: Resolution,
    needed: tuple[int, ...],
    lost: list[str],
) -> str:
    """All hosts go back to one checkpoint, or begin at the beginning; where the layers came from."""
    url = trainer.checkpoint
    mine = {_key(step): step for step in saved_steps(url)} if url else {}
    answers = job.agree(
        f"{prefix}/checkpoints", {key: stored_step.generation for key, stored_step in mine.items()}
    )
    trainer.before = max((max(there.values()) for there in answers.values() if there), default=0)
    problems: list[str] = []
    for key, saved in mine.items():
        if url is None or not all(key in others for others in answers.values()):
            continue
        wholes, problem = {}, ""
        try:
            wholes = {index: read_layer(url, saved, index, trainer.names) for index in needed}
        except UserError as error:
            problem = str(error)
        fresh = [text for text in job.agree(f"{prefix}/read/{key}", problem).values() if text]
        problems += fresh
        if not fresh:
            for index, whole in wholes.items():
                _take(trainer, index, whole)
            trainer.version, trainer.era = saved.step, job.generation
            if resolution.version is not None and job.rank == 0:
                gone = f"the last copy of {', '.join(lost)} is gone"
                job.event("note", text=f"{gone}: all go back to step {saved.step} from storage")
            return "storage"
    if resolution.version is None and not problems:
        for index in needed:
            trainer.layers[index] = trainer.build(index)
        trainer.version, trainer.era = 0, job.generation
        return "start"
    where = "; ".join(problems) or (f"none in {url}" if url else "none are configured")
    raise LayersLost(
        f"the last copy of {', '.join(lost)} is gone at step {resolution.version}; checkpoints: {where}"
    )
