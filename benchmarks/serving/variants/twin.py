"""A load on rented hosts: what it costs where hosts come and go, and what the same hosts do of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measure import on_all_processors
from benchmarks.harness.rows import Row, figure
from windtunnel.serving.variants.model import Variant
from windtunnel.serving.variants.policy import POLICIES
from windtunnel.serving.variants.twin import VariantsOutcome, VariantsSetting, queries, simulate
from windtunnel.serving.variants.twin.catalogue import KINDS, catalogue
from windtunnel.traces.rates import read_counts

BOUNDS = (0.02, 0.1, 0.3)
"""Seconds that queries ask for, a third of them each."""
PUBLISHED = "INFaaS, ATC 2021, abstract"
CLOUDS = {"m5 and p3": ("cpu", "v100"), "m5, p3 and inf1": ("cpu", "v100", "inferentia")}
RATES = {"m5 and p3": (5.0, 40.0), "m5, p3 and inf1": (40.0,)}
"""Queries a second, by what there is to rent."""
OURS = ("cheapest", "infaas")


@dataclass(frozen=True)
class Trial:
    """A policy under ``rate`` queries a second, for ``seconds``; the seed draws them, and which part of the
    trace they follow."""

    policy: str
    cloud: str
    rate: float
    seed: int
    seconds: int
    fixed: bool
    trace: Path | None


def cost_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    """Dollars an hour, by load and by which hosts there are to rent."""
    seconds = 150 if quick else 300
    others = ("individual", "static", "shared")
    every: dict[str, list[float]] = {name: [] for name in OURS}
    for cloud in [*CLOUDS][:1] if quick else CLOUDS:
        for rate in (40.0,) if quick else RATES[cloud]:
            outcomes = _outcomes((*OURS, *others), cloud, rate, seconds, False, trace, quick)
            for name in OURS:
                for other in others:
                    pairs = zip(outcomes[name], outcomes[other], strict=True)
                    over, own = [theirs.price / mine.price for mine, theirs in pairs], other == "individual"
                    every[name] += over if own else []
                    yield figure(
                        f"{cloud}, {rate:g} queries/s: {other} over {name}", "x", emulated=over,
                        published=8.5 if own else None, source=PUBLISHED,
                        note=_words(outcomes[name], outcomes[other]),
                    )  # fmt: skip
    for name, over in every.items():
        for how, value, claim in (("mean", mean(over), 8.5), ("at most", max(over), 21.6)):
            words, note = f"all of these: individual over {name}, {how}", f"of {len(over)} trials"
            yield figure(words, "x", emulated=value, published=claim, source=PUBLISHED, note=note)


def fixed_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    """The same hosts for all policies, and a load that is too much for some."""
    for rate in (600.0,) if quick else (400.0, 1200.0):
        outcomes = _outcomes((*OURS, "shared"), "m5 and p3", rate, 60, True, trace, quick)
        base = outcomes.pop("shared")
        for name, mine in outcomes.items():
            pairs = list(zip(mine, base, strict=True))
            answered = [(a.came - a.late - a.shed) / (a.came - b.late - b.shed) for a, b in pairs]
            fewer = [(b.late + b.shed) / max(1, a.late + a.shed) for a, b in pairs]
            words, note = f"{rate:g} queries/s: {name} over one variant", _words(mine, base)
            for measure, over, claim in (
                ("answered in time", answered, 1.3),
                ("fewer late or shed", fewer, 1.6),
            ):
                named = f"{words}: {measure}"
                yield figure(named, "x", emulated=over, published=claim, source=PUBLISHED, note=note)


def _outcomes(
    names: Sequence[str], cloud: str, rate: float, seconds: int, fixed: bool, trace: Path | None, quick: bool
) -> dict[str, list[VariantsOutcome]]:
    """Of each policy what became of each seed."""
    seeds = range(1 if quick else 5)
    return on_all_processors(
        _outcome,
        {name: [Trial(name, cloud, rate, seed, seconds, fixed, trace) for seed in seeds] for name in names},
    )


def _outcome(trial: Trial) -> VariantsOutcome:
    variants = tuple(variant for variant in catalogue() if variant.hardware in CLOUDS[trial.cloud])
    rng = np.random.default_rng(trial.seed)
    load = _load(trial, rng)
    load_queries = list(queries(load, variants, rng, bounds=BOUNDS))
    peak: dict[str, float] = {}
    if trial.policy == "static":  # what its owner has to keep for the busiest seconds
        for _, query in load_queries:
            peak[query.name] = peak.get(query.name, 0.0) + load.max() / load.sum()
    first = {"cpu": 4, "v100": 1} if trial.fixed else {"cpu": 1}
    own = trial.policy in ("individual", "static")
    setting = VariantsSetting(
        variants, first, trial.fixed, pin(variants, BOUNDS[0]), own, peak, 25.0 if trial.fixed else 60.0
    )
    return simulate(load_queries, float(trial.seconds), setting, POLICIES[trial.policy])


def _load(trial: Trial, rng: np.random.Generator) -> NDArray[np.float64]:
    """Mean queries of each second: of a part of the trace, or a synthetic wave with bursts."""
    if trial.trace is not None:
        counts = read_counts(trial.trace).astype(float)
        begin = rng.integers(0, max(1, len(counts) - trial.seconds))
        rates = counts[begin : begin + trial.seconds]
    else:
        wave = 1 + 0.4 * np.sin(np.arange(trial.seconds) * (2 * np.pi / 300) + rng.uniform(0, 2 * np.pi))
        rates = wave * np.where(rng.random(trial.seconds) < 0.03, 2.0, 1.0)
    return np.asarray(rates * (trial.rate / rates.mean()))


def _words(ours: Sequence[VariantsOutcome], theirs: Sequence[VariantsOutcome]) -> str:
    def costs(outcomes: Sequence[VariantsOutcome]) -> str:
        price = median(each.price / each.seconds * 3600 for each in outcomes)
        late = median(each.late / max(1, each.came) for each in outcomes)
        shed = median(each.shed / max(1, each.came) for each in outcomes)
        return f"${price:.2f} an hour, {late:.2%} late, {shed:.2%} shed"

    return f"{costs(ours)}; against {costs(theirs)}"


def pin(variants: Sequence[Variant], bound: float) -> dict[str, str]:
    """For each architecture what its owner would deploy who may have one variant: the cheapest host that
    answers within the bound, and the variant that does most on it; the fastest where none does."""
    chosen = {}
    for name in dict.fromkeys(variant.architecture for variant in variants):
        mine = [variant for variant in variants if variant.architecture == name]
        fit = [variant for variant in mine if variant.latency() <= bound] or [
            min(mine, key=lambda variant: variant.latency())
        ]
        chosen[name] = min(fit, key=lambda variant: (KINDS[variant.hardware].price, -variant.rate)).name
    return chosen
