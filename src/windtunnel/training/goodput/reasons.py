"""The advice in sentences: the reasons for the copies, the intervals and the recovery method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windtunnel.training.checkpoint.policy.placement import weakest_domain
from windtunnel.training.goodput.model import (
    MEMORY,
    RUN,
    STORAGE,
    TEMPLATES,
    WITH_SPARE,
    Choice,
    Question,
)
from windtunnel.training.goodput.twin.model import JobModel, SimulationResult
from windtunnel.training.goodput.twin.restart import copy_time, save_stall, write_time


def worth(result: SimulationResult, job: JobModel) -> float:
    """The goodput of a scheme for the hosts that it holds: a spare is one more."""
    hosts = job.hosts + (result.scheme == WITH_SPARE)
    return result.goodput * job.hosts / hosts


def reasons(
    question: Question,
    choices: Sequence[Choice],
    chosen: Choice,
    intervals: Mapping[str, int],
    results: Sequence[SimulationResult],
    best: SimulationResult,
) -> tuple[str, ...]:
    """Sentences for `Advice.reasons`."""
    return (
        _copies(question, choices, chosen),
        *_placement(question, chosen),
        _to_memory(question, chosen),
        _to_storage(question, chosen, intervals),
        *_ways(question, intervals, results, best),
    )


def _copies(question: Question, choices: Sequence[Choice], chosen: Choice) -> str:
    others = "".join(
        f", {other.fallbacks:.3g} with {other.copies}" + ("" if other.fits else " (does not fit)")
        for other in choices
        if abs(other.copies - chosen.copies) == 1
    )
    return (
        f"Keep {chosen.copies} copies: {chosen.fallbacks:.3g} recoveries from storage are expected in"
        f" {question.horizon / 86400:.3g} days{others}. Memory of a host: {chosen.sum_in_words}."
    )


def _placement(question: Question, chosen: Choice) -> list[str]:
    if chosen.copies == 1:
        return []
    names = len(set(question.domains))
    if names == 1:
        return [f"Placement {chosen.placement.kind}: the fewest copy sets that two losses could hit."]
    weak = weakest_domain(chosen.placement, question.domains)
    text = "no domain holds all copies of a shard" if weak is None else weak.why
    return [f"Placement across the {names} failure domains: {text}."]


def _to_memory(question: Question, chosen: Choice) -> str:
    job, costs = question.job, question.costs
    took = (chosen.copies - 1) * job.state_bytes / job.hosts / costs.peer_bandwidth
    often = "step" if chosen.every == 1 else f"{chosen.every} steps"
    return (
        f"Checkpoint to memory every {often}: the copy within a host stops training for"
        f" {copy_time(job, costs):.3g} s. Replication takes {took:.3g} s beside training."
    )


def _to_storage(question: Question, chosen: Choice, intervals: Mapping[str, int]) -> str:
    job, costs = question.job, question.costs
    seconds = chosen.storage_every * job.step_time
    least = write_time(job, costs)
    if seconds < least + job.step_time:
        bound = ", as long as a save takes"
    elif seconds > question.longest - job.step_time:
        bound = ", the longest allowed"
    else:
        bound = ""
    return (
        f"Checkpoint to storage every {chosen.storage_every} steps ({seconds / 3600:.3g} h{bound}):"
        f" one failure in {_failures_per_fall(question, chosen)} needs it. A save stops training for"
        f" {save_stall(job, costs):.3g} s, and is complete after {least:.3g} s. Without copies in memory"
        f" the interval would be {intervals[STORAGE]} steps"
        f" ({intervals[STORAGE] * job.step_time / 60:.3g} min)."
    )


def _failures_per_fall(question: Question, chosen: Choice) -> str:
    falls = chosen.fallbacks
    return f"{question.horizon / question.mtbf / falls:.3g}" if falls > 0 else "more than can be counted"


def _ways(
    question: Question,
    intervals: Mapping[str, int],
    results: Sequence[SimulationResult],
    best: SimulationResult,
) -> list[str]:
    by_name = {result.scheme: result for result in results}
    others = ", ".join(
        f"{by_name[name].goodput:.1%} {name}" for name in RUN if name in by_name and name != best.scheme
    )
    sentences = [f"Recover by {best.scheme}: goodput {best.goodput:.1%} (emulated), compared with {others}."]
    if best.scheme == WITH_SPARE:
        sentences.append(f"The spare is one host more than the {question.job.hosts} that train.")
    if best.scheme == TEMPLATES:
        other = by_name.get(WITH_SPARE, by_name[MEMORY])
        sentences.append(
            "Templates need a program with a PipelineTrainer that takes --checkpoint and --checkpoint-every,"
            f" as examples/train_pipeline.py. Any other program uses {other.scheme} ({other.goodput:.1%})."
        )
    return sentences
