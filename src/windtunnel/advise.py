"""What would make a job faster on a cluster, from one emulation of it. All figures are emulated."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windtunnel.training.bottleneck.policy import decide
from windtunnel.training.bottleneck.run import Analysis, weigh
from windtunnel.training.gradsync.run import buckets, gain, plan_run, verdict


@dataclass(frozen=True)
class Advice:
    """``finding``: a sentence. ``share``: of an iteration that is lost, where that is known; ``gain``: the
    speed that following it is predicted to add, 0.1 for a tenth. ``command``: that goes deeper."""

    about: str
    finding: str
    share: float | None
    gain: float | None
    command: str


def advise(
    program: str, arguments: Sequence[str], cluster: str, progress: Callable[[str, float], None]
) -> list[Advice]:
    """Emulate ``program`` once on ``cluster``: how much of it waits for the network, and whether compressing
    and fusing gradients helps. The plan for these is kept as a run.

    Raises:
        UserError: program or cluster is wrong; the job has one rank, or no gradients of its own (sharding).
        ScriptError: the program failed.
    """
    run_plan = plan_run(program, arguments, cluster=cluster, progress=progress)
    emulation = run_plan.emulation
    assert emulation is not None  # a program was given
    timing = emulation.timing
    waits = {k: seconds for k, seconds in timing.critical_path.items() if k.startswith("communication:")}
    share = sum(waits.values()) / timing.iteration_time_s
    whole = f"{timing.iteration_time_s * 1e3:.4g} ms"
    words = f"{share:.1%} of an emulated iteration of {whole} waits for collectives"
    if waits:
        largest = max(waits, key=lambda group: waits[group]).removeprefix("communication:")
        words += f", most of it for those over {largest}"
    again = shlex.join(["windtunnel", "bottleneck", "--cluster", cluster, program, *arguments])
    if emulation.cluster.hosts > 1:
        points, needs, observation = weigh(emulation)
        words = f"{Analysis('', cluster, points, decide(observation), needs).sentence()}; {words}"
    else:
        again = shlex.join(["windtunnel", "emulate", "--cluster", cluster, program, *arguments])
    explain = f"windtunnel gradsync explain {run_plan.run}"
    sentence = (
        f"{verdict(run_plan.plan)}; all this by the plan's own timeline, which has "
        f"{buckets(run_plan.plan) * 1e3:.4g} ms for the iteration that is emulated with {whole}"
    )
    return [
        Advice("network", words, share, None, again),
        Advice("gradients", sentence, None, gain(run_plan.plan), explain),
    ]
