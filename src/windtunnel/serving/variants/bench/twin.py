"""A load on rented hosts: what it costs where hosts come and go, and what the same hosts do of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.bench.rows import Row
from windtunnel.serving.variants.model import Variant
from windtunnel.serving.variants.policy import POLICIES
from windtunnel.serving.variants.twin import Outcome, Setting, queries, simulate
from windtunnel.serving.variants.twin.catalogue import catalogue
from windtunnel.serving.variants.twin.world import pin
from windtunnel.traces.rates import read_counts

BOUNDS = (0.02, 0.1, 0.3)
"""Seconds that queries ask for, a third of them each."""
PUBLISHED = "INFaaS, ATC 2021, abstract"
CLOUDS = {"m5 and p3": ("cpu", "v100"), "m5, p3 and inf1": ("cpu", "v100", "inferentia")}


def cost_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    """Dollars an hour, by load and by which hosts there are to rent."""
    seconds, scales = (150, (1.0,)) if quick else (600, (0.1, 1.0, 4.0))
    load = _load(trace, seconds)
    for cloud, hardware in CLOUDS.items():
        variants = tuple(one for one in catalogue() if one.hardware in hardware)
        for scale in scales:
            found = {
                name: _outcome(name, load * scale, variants, {"cpu": 1})
                for name in ("cheapest", "infaas", "shared", "individual", "static")
            }
            where = f"{cloud}, {found['infaas'].came / found['infaas'].seconds:.0f} queries/s"
            for name in ("cheapest", "infaas"):
                ours = found[name].price
                for other in ("individual", "static", "shared"):
                    published = other == "individual"
                    yield Row(
                        "cost", f"{where}: {other} over {name}", "x", emulated=found[other].price / ours,
                        published=8.5 if published else None, source=PUBLISHED if published else "",
                        note=_words(found[name], found[other])
                        + ("; published: mean, 21.6 at most" if published else ""),
                    )  # fmt: skip


def fixed_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    """The same hosts for all policies, and a load that is too much for some."""
    seconds = 110 if quick else 180
    variants = tuple(one for one in catalogue() if one.hardware in CLOUDS["m5 and p3"])
    for scale in (20.0,) if quick else (8.0, 12.0, 20.0):
        load = _load(trace, seconds) * scale
        found = {
            name: _outcome(name, load, variants, {"cpu": 4, "v100": 1}, fixed=True)
            for name in ("cheapest", "infaas", "round-robin", "shared")
        }
        base = found["shared"]
        for name in ("cheapest", "infaas", "round-robin"):
            one = found[name]
            where = f"{base.came / base.seconds:.0f} queries/s: {name} over one variant"
            yield Row(
                "fixed", f"{where}: answered in time", "x", emulated=_in_time(one) / _in_time(base),
                published=1.3, source=PUBLISHED, note=_words(one, base),
            )  # fmt: skip
            yield Row(
                "fixed", f"{where}: fewer late", "x", emulated=base.late / one.late if one.late else None,
                published=1.6, source=PUBLISHED, note=_words(one, base),
            )  # fmt: skip


def _load(trace: Path | None, seconds: int) -> NDArray[np.float64]:
    """Mean queries of each second: of the trace, or a synthetic wave of 40 a second with bursts."""
    if trace is not None:
        return read_counts(trace)[:seconds].astype(float)
    rng = np.random.default_rng(7)
    wave = 40.0 * (1 + 0.4 * np.sin(np.arange(seconds) * (2 * np.pi / 300)))
    return wave * np.where(rng.random(seconds) < 0.03, 2.0, 1.0)


def _outcome(
    name: str, load: NDArray[np.float64], variants: tuple[Variant, ...], first: dict[str, int],
    fixed: bool = False,
) -> Outcome:  # fmt: skip
    asked = list(queries(load, variants, np.random.default_rng(0), bounds=BOUNDS))
    own = name in ("individual", "static")
    peak: dict[str, float] = {}
    if name == "static":  # what its owner has to keep for the busiest seconds
        for _, query in asked:
            peak[query.architecture] = peak.get(query.architecture, 0.0) + load.max() / load.sum()
    setting = Setting(
        variants, first, fixed, pin(variants, BOUNDS[0], 0.0), own, peak
    )  # fmt: skip
    return simulate(iter(asked), float(len(load)), setting, POLICIES[name])


def _in_time(found: Outcome) -> int:
    return found.came - found.late


def _words(ours: Outcome, theirs: Outcome) -> str:
    def one(found: Outcome) -> str:
        return (
            f"${found.price / found.seconds * 3600:.2f} an hour, {found.late / max(1, found.came):.2%} late"
        )

    return f"{one(ours)}; against {one(theirs)}"
