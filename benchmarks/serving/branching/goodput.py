"""How many requests a second keep their promises under each policy, on the twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.harness.rows import Row, figure
from benchmarks.serving.branching.workload import Workload, attainment, goodput

SEEDS, FEW = (1, 2, 3), (1,)
PUBLISHED = {"off": (1.77, ">= 1.3 x"), "eager": (1.48, ">= 1.15 x")}
"""Of TAPER over each: the ratio in the paper's abstract, and what is to be reached here."""
SOURCE = "Gandhi et al., arXiv 2605.06914, abstract; Qwen3-32B, other workload"
BASE = Workload()
ARMS = ("off", "eager", "taper")
CAPS = ("strict", "cap2", "cap4", "cap8")
LOADS = (0.7, 0.85, 1.0, 1.15)
SHORT = replace(BASE, seconds=75.0, warm=30.0)
MAP: Mapping[str, Workload] = {
    "steady": replace(SHORT, burst=0.0),
    "waves of half the load": replace(SHORT, burst=0.5),
    "35 ms a token": replace(SHORT, tpot=0.035),
    "80 ms a token": replace(SHORT, tpot=0.08),
    "no context in the cache": replace(SHORT, cached=0, prompt=700),
    "4,000 tokens of context": replace(SHORT, cached=4000),
    "2 to 3 branches": replace(SHORT, branches=(2, 3)),
    "12 to 24 branches": replace(SHORT, branches=(12, 24)),
    "3 of 10 requests branch": replace(SHORT, share=0.3),
    "every request branches": replace(SHORT, share=1.0),
    "every request branches, step pace": replace(SHORT, share=1.0, pace="step"),
}


def goodput_rows(quick: bool) -> Iterator[Row]:
    """By token pace and by step pace."""
    for pace, seeds in (("token", SEEDS), ("step", SEEDS[:2])):
        work = replace(SHORT if quick else BASE, pace=pace)
        found = _found(work, ARMS, FEW if quick else seeds)
        caps = _found(work, CAPS, FEW) if not quick and pace == "token" else {}
        for name, rates in {**found, **caps}.items():
            note = f"{min(rates):.2f} to {max(rates):.2f}, {len(rates)} seeds"
            yield figure(f"{pace} pace: {name}", "requests/s", emulated=median(rates), note=note)
        for name, (published, goal) in PUBLISHED.items():
            ratios = _over(found, name)
            yield figure(
                f"{pace} pace: taper over {name}", "x", goal=goal, emulated=median(ratios),
                published=published, source=SOURCE, note=f"{min(ratios):.2f} to {max(ratios):.2f}",
            )  # fmt: skip


def load_rows(quick: bool) -> Iterator[Row]:
    """The share of requests that got what they were promised, by load."""
    work = SHORT if quick else BASE
    full = median(_found(work, ("taper",), FEW)["taper"])
    for load in LOADS[:: 3 if quick else 1]:
        with ProcessPoolExecutor() as pool:
            shares = pool.map(partial(_share, work, load * full), ARMS)
            for name, share in zip(ARMS, shares, strict=True):
                yield figure(f"{name} at {load:.0%} of taper's goodput", "", emulated=share)


def map_rows(quick: bool) -> Iterator[Row]:
    """One thing of the workload changed at a time."""
    for words, work in list(MAP.items())[:: 9 if quick else 1]:
        found = _found(work, ARMS, FEW)
        for name in ("off", "eager"):
            note = f"{median(found['taper']):.2f} and {median(found[name]):.2f} requests/s, one seed"
            ratio = median(_over(found, name))
            yield figure(f"{words}: taper over {name}", "x", emulated=ratio, note=note)


def _found(work: Workload, policies: Sequence[str], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Goodput by policy, seed by seed, on all processors."""
    jobs = [(name, seed) for name in policies for seed in seeds]
    with ProcessPoolExecutor() as pool:
        rates = list(pool.map(partial(_one, work), jobs))
    return {name: rates[at * len(seeds) : (at + 1) * len(seeds)] for at, name in enumerate(policies)}


def _one(work: Workload, job: tuple[str, int]) -> float:
    return goodput(work, *job)


def _share(work: Workload, rate: float, policy: str) -> float:
    return attainment(work, policy, rate, FEW[0])


def _over(found: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Ratios of ``taper``, seed by seed."""
    return [one / max(other, 1e-9) for one, other in zip(found["taper"], found[name], strict=True)]
