"""A plan for a program or a profile, kept as a run: what was given, what was decided, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.cluster.load import load_cluster
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store
from windtunnel.training.gradsync.files import PLAN, PROFILE, read, write
from windtunnel.training.gradsync.formats import steps
from windtunnel.training.gradsync.model import NONE, SyncPlan, SyncProfile
from windtunnel.training.gradsync.policy import PlanRequest, decide, steps_with, usable

if TYPE_CHECKING:
    from windtunnel.training.emulate.emulation import EmulationResult, Progress


CAPABILITY = "training.gradsync"
LITTLE = 0.01
"""Of an iteration: less than that is no gain to name."""


@dataclass(frozen=True)
class Planned:
    """A plan with its profile, where both lie, and the emulation that they were made from in this process."""

    run: str
    directory: Path
    profile: SyncProfile
    plan: SyncPlan
    emulation: EmulationResult | None = None

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            "run": self.run, "directory": str(self.directory), "verdict": verdict(self.plan),
            "to_loss_s": self.plan.forecasts[0].to_loss, "plan": to_plain(self.plan),
        }  # fmt: skip


def plan(
    profile: SyncProfile, cluster: str | None = None, *, codecs: Sequence[str] = (), seed: int = 0,
    lossy: bool = False,
) -> SyncPlan:  # fmt: skip
    """What a profile calls for, on the network that was measured, or on that of ``cluster`` (its file, or its
    name in the catalogue); ``codecs``: that are allowed, all of the profile's where none are named; with
    which training needs more steps to a loss only where ``lossy`` says so. The same on all ranks.

    Raises:
        UserError: no such cluster or codec, or a profile without gradients.
    """
    return decide(_request(_on(profile, cluster), codecs, seed, lossy))


def _request(profile: SyncProfile, codecs: Sequence[str], seed: int, lossy: bool) -> PlanRequest:
    """Raises:
    UserError: a codec has no cost in the profile, or may not be used.
    """
    request = PlanRequest(profile, tuple(codecs), seed, steps(), lossy)
    accepted = usable(request)
    for name in codecs:
        if name not in accepted:
            why = "the profile has no cost of it"
            if (cost := profile.cost(name)) is not None:
                more = steps_with(cost, request.steps)
                why = f"training needs {more:.2g} times as many steps with it to a loss, which `lossy` allows"
                if math.isinf(more):
                    why = "how many steps training needs with it is not measured"
            raise UserError(f"`codecs` {name}: {why}; accepted are {', '.join(sorted(accepted))}")
    return request


def _on(profile: SyncProfile, cluster: str | None) -> SyncProfile:
    """With the network of a cluster, if one is given."""
    if cluster is None:
        return profile
    from windtunnel.training.gradsync.twin import network_of

    where = load_cluster(cluster)
    return replace(profile, network=network_of(where), emulated=f"on {where.name}")


def plan_run(
    program: str | None, arguments: Sequence[str] = (), *, cluster: str | None = None,
    profile: Path | None = None, codecs: Sequence[str] = (), seed: int = 0, lossy: bool = False,
    progress: Progress = lambda *_: None,
) -> Planned:  # fmt: skip
    """Plan for ``program`` emulated on ``cluster``, or for a ``profile`` that
    was measured (on ``cluster``'s network instead of its own, if that is given).

    Raises:
        UserError: neither or both are given, or one of them is wrong.
        ScriptError: the program failed.
    """
    if (program is None) == (profile is None):
        raise UserError("gradsync plan: a SCRIPT or `profile` FILE is needed, and not both")
    if program is not None and cluster is None:
        raise UserError("gradsync plan: `cluster` is needed to emulate a script")
    inputs = {
        "script": program, "args": [*arguments], "cluster": cluster,
        "profile": str(profile) if profile else None, "codecs": [*codecs], "lossy": lossy,
    }  # fmt: skip
    where = load_cluster(cluster) if cluster is not None else None
    job = _on(read(profile, SyncProfile), cluster) if profile is not None else None
    run = Store.open().begin(CAPABILITY, inputs, seed)
    log = EventLog(run.directory / NAME)
    emulation = None
    with run.failing(), closing(log):
        if job is None:
            from windtunnel.training.emulate.emulation import simulate
            from windtunnel.training.emulate.options import Options
            from windtunnel.training.emulate.run import program_of
            from windtunnel.training.gradsync.twin import profile_of

            assert program is not None and where is not None
            script = program_of(program, arguments)
            script.check()
            emulation = simulate(script, where, Options(), progress)
            job = profile_of(emulation)
        observation = _request(job, codecs, seed, lossy)
        best = decide(observation)
        log.decision(CAPABILITY, "search", observation, best)
        write(run.directory / PROFILE, job)
        write(run.directory / PLAN, best)
    ours = best.forecasts[0]
    run.finish({"verdict": verdict(best), "iteration_time_s": ours.seconds, "to_loss_s": ours.to_loss})
    return Planned(run.id, run.directory, job, best, emulation)


def stored(name: str) -> Planned:
    """The plan of a run in the store, by its id, or ``last``.

    Raises:
        UserError: there is none, or the run made no plan.
    """
    store = Store.open()
    run = store.newest(CAPABILITY, lambda _: True) if name == "last" else store.get(name)
    if run is None:
        raise UserError("the store has no plan yet; make one with: windtunnel gradsync plan")
    if run.capability != CAPABILITY or run.status != "done":
        raise UserError(
            f"run {run.id} is a {run.capability} that is {run.status}; a finished plan is accepted"
        )
    where = run.directory
    return Planned(run.id, where, read(where / PROFILE, SyncProfile), read(where / PLAN, SyncPlan))


def buckets(plan: SyncPlan) -> float:
    """Predicted seconds of an iteration as DDP has it: plain gradients in its buckets."""
    return plan.forecasts[1].seconds


def gain(plan: SyncPlan) -> float:
    """The speed to a loss that it is predicted to add to that: 0.1 is a tenth."""
    return buckets(plan) / plan.forecasts[0].to_loss - 1


def verdict(plan: SyncPlan) -> str:
    """One sentence: what to do, and what it is worth."""
    ours, plain = plan.forecasts[0], buckets(plan)
    source = f" (emulated: {plan.emulated})" if plan.emulated else ""
    options = {group.option for group in plan.groups}
    used = sorted({option.codec for option in options if option.scheme != "sparse"} - {NONE})
    if not used:
        fused = f"; other groups than DDP's gain {gain(plan):.1%}" if gain(plan) >= LITTLE else ""
        bound = plain / plan.bound - 1
        return f"do not compress: nothing makes an iteration shorter by more than {bound:.1%}{fused}{source}"
    single = min(plan.forecasts[1:], key=lambda forecast: forecast.to_loss)
    return (
        f"compress with {', '.join(used)}: {ours.seconds * 1e3:.4g} ms an iteration in place of "
        f"{plain * 1e3:.4g}, {ours.to_loss * 1e3:.4g} to a loss ({ours.steps:.3g} times the steps, "
        f"{gain(plan):+.1%} speed); the best single choice, {single.choice}, takes "
        f"{single.to_loss * 1e3:.4g} to a loss{source}"
    )
