"""Plans against every single choice, in real processes whose links are limited, and their predictions.

Processes are ranks of DDP in network namespaces, with tc-tbf on both ends of each one's link. Computing is
replayed (`live_rank`); encoding, decoding and sending are real. Times are of the slowest rank; bytes, with
headers, of the rank that sends most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from scipy.stats import spearmanr

from windtunnel.bench.rows import Row, left_out
from windtunnel.linux import network
from windtunnel.training.gradsync.bench.live_rank import FUSED, HOOK, main
from windtunnel.training.gradsync.bench.ranks import MBIT, ranks
from windtunnel.training.gradsync.model import NONE

FABRICS = ((2, 50), (2, 100), (4, 50), (4, 100))
"""Ranks, and Mbit/s of each one's link."""
CODECS = ("fp16", "int8", "sign", "topk:0.01", "dragonn:0.01", "randomk:0.01")
REPEATS = 6
LIMIT = 200.0


def live_rows(quick: bool) -> Iterator[Row]:
    """By fabric: each choice, and what the plan is to it."""
    reason = network.missing()
    if reason is not None:
        yield left_out("live", "plans between namespaces", reason)
        return
    with ranks() as started:
        for world, rate in FABRICS[1:2] if quick else FABRICS:
            codecs = ["fp16", "sign", FUSED] if quick else list(CODECS)
            given = {"codecs": codecs, "repeats": 3 if quick else REPEATS}
            told = started.run(f"{main.__module__}:main", given, world, rate * MBIT, LIMIT)
            yield from rows_of(f"{world} ranks at {rate} Mbit/s", told)


def rows_of(fabric: str, told: list[dict[str, Any]]) -> Iterator[Row]:
    """The rows of one fabric, from what its ranks found."""
    seconds, predicted = {}, {}
    for name, arm in told[0]["arms"].items():
        arms = [one["arms"][name] for one in told]
        slowest = [max(each) for each in zip(*(one["seconds"] for one in arms), strict=True)]
        seconds[name], predicted[name] = median(slowest), arm["predicted"]
        yield Row(
            "live", f"{fabric}: {name}", "ms", measured=seconds[name] * 1e3, emulated=predicted[name] * 1e3,
            note=f"{min(slowest) * 1e3:.0f} to {max(slowest) * 1e3:.0f} ms, "
            f"{max(one['nbytes'] for one in arms) / 2**20:.2f} MiB, {arm['groups']} groups"
            + (f": {'; '.join(arm['used'])}" if name == "plan" else ""),
        )  # fmt: skip
    yield from _judged(fabric, seconds, predicted, told[0])


def _judged(
    fabric: str, seconds: Mapping[str, float], predicted: Mapping[str, float], told: Mapping[str, Any]
) -> Iterator[Row]:
    single = [name for name in seconds if name in (NONE, HOOK, *CODECS)]
    best = min(single, key=lambda name: seconds[name])
    for other, most in ((best, 1.02), (NONE, 1.01)):
        ratio = seconds["plan"] / seconds[other]
        words = f"best single choice ({other})" if other == best and most == 1.02 else "none"
        yield Row(
            "live", f"{fabric}: plan / {words}", "x", measured=ratio,
            emulated=predicted["plan"] / predicted[other], target=f"<= {most} x", met=ratio <= most,
        )  # fmt: skip
    errors = {name: abs(predicted[name] / seconds[name] - 1) for name in seconds}
    worst = max(errors, key=lambda name: errors[name])
    yield Row(
        "live", f"{fabric}: mean error of predictions", "%", measured=100 * fmean(errors.values()),
        target="<= 10 %", met=fmean(errors.values()) <= 0.1,
        note=f"largest {errors[worst]:.1%} ({worst}); lines of collectives fit to {told['error']:.1%}, "
        f"handing a group over takes {told['handing'] * 1e3:.2f} ms",
    )  # fmt: skip
    order = float(spearmanr([*seconds.values()], [predicted[name] for name in seconds]).statistic)
    yield Row(
        "live", f"{fabric}: Spearman, predicted and measured", "", measured=order, target=">= 0.9",
        met=order >= 0.9, note=f"over {len(seconds)} choices",
    )  # fmt: skip
    fused = seconds[f"{FUSED} in its best groups"]
    for name, words in ((f"{FUSED} by layers", "single layers"), (FUSED, "DDP's buckets")):
        yield Row(
            "live", f"{fabric}: {FUSED} in {words} / in its best groups", "x",
            measured=seconds[name] / fused,
            emulated=predicted[name] / predicted[f"{FUSED} in its best groups"],
        )  # fmt: skip
