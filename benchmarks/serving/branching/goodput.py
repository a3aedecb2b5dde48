"""How many requests a second keep their promises under each policy, on the twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.harness.rows import Row, left_out
from benchmarks.serving.branching.workload import LIMITS, Workload, attainment, goodput

SEEDS, FEW, TUNING = (1, 2, 3), (1,), (11,)
PUBLISHED: Mapping[str, tuple[float, float]] = {"off": (1.77, 1.3), "eager": (1.48, 1.15)}
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
            yield Row(
                "goodput", f"{pace} pace: {name}", "requests/s", emulated=median(rates),
                note=f"{min(rates):.2f} to {max(rates):.2f}, {len(rates)} seeds",
            )  # fmt: skip
        for name, (published, target) in PUBLISHED.items():
            ratios = _over(found, name)
            yield Row(
                "goodput", f"{pace} pace: taper over {name}", "x", emulated=median(ratios),
                published=published, source=SOURCE, target=f">= {target} x", met=median(ratios) >= target,
                note=f"{min(ratios):.2f} to {max(ratios):.2f}",
            )  # fmt: skip


def load_rows(quick: bool) -> Iterator[Row]:
    """The share of requests that got what they were promised, by load."""
    work = SHORT if quick else BASE
    full = median(_found(work, ("taper",), FEW)["taper"])
    jobs = [(name, seed) for name in ARMS for seed in FEW]
    for load in LOADS[:: 3 if quick else 1]:
        with ProcessPoolExecutor() as pool:
            shares = list(pool.map(partial(_share, work, load * full), jobs))
        for place, name in enumerate(ARMS):
            mine = shares[place * len(FEW) : (place + 1) * len(FEW)]
            yield Row(
                "load", f"{name} at {load:.0%} of taper's goodput", "", emulated=median(mine),
                note=f"{min(mine):.1%} to {max(mine):.1%}, {len(mine)} seeds",
            )  # fmt: skip


def map_rows(quick: bool) -> Iterator[Row]:
    """One thing of the workload changed at a time."""
    for words, work in list(MAP.items())[:: 9 if quick else 1]:
        found = _found(work, ARMS, FEW)
        for name in ("off", "eager"):
            rates, ratios = median(found[name]), _over(found, name)
            yield Row(
                "map", f"{words}: taper over {name}", "x", emulated=median(ratios) if rates else None,
                note=f"{median(found['taper']):.2f} and {rates:.2f} requests/s, one seed",
            )  # fmt: skip


def search_rows(quick: bool) -> Iterator[Row]:
    """How much of the slack to spend: chosen on some seeds, told on others."""
    if quick:
        yield left_out("search", "how much of the slack to spend", "left out by --quick")
        return
    shares = (0.2, 0.5, LIMITS.rho)
    with ProcessPoolExecutor() as pool:
        told = [list(pool.map(partial(_spent, seed), shares)) for seed in (*TUNING, *FEW)]
    tuned, other = (dict(zip(shares, rates, strict=True)) for rates in told)
    best = max(tuned, key=tuned.__getitem__)
    yield Row(
        "search", f"taper with rho {best:g} over rho {LIMITS.rho:g}", "x",
        emulated=other[best] / max(other[LIMITS.rho], 1e-9),
        note="chosen on another seed: " + ", ".join(f"{rho:g} {rate:.2f}/s" for rho, rate in tuned.items()),
    )  # fmt: skip


def _found(work: Workload, policies: Sequence[str], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Goodput by policy, seed by seed, on all processors."""
    jobs = [(name, seed) for name in policies for seed in seeds]
    with ProcessPoolExecutor() as pool:
        rates = list(pool.map(partial(_one, work), jobs))
    return {name: rates[at * len(seeds) : (at + 1) * len(seeds)] for at, name in enumerate(policies)}


def _one(work: Workload, job: tuple[str, int]) -> float:
    return goodput(work, *job)


def _spent(seed: int, rho: float) -> float:
    return goodput(SHORT, "taper", seed, replace(LIMITS, rho=rho))


def _share(work: Workload, rate: float, job: tuple[str, int]) -> float:
    name, seed = job
    return attainment(work, name, rate, seed)


def _over(found: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Ratios of ``taper``, seed by seed."""
    return [one / max(other, 1e-9) for one, other in zip(found["taper"], found[name], strict=True)]
