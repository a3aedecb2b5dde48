"""Real packets through the relay: ours over UDP and this kernel's TCP, each beside its twin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.harness.measure import in_turn, spread
from benchmarks.harness.rows import Row, figure, left_out, need
from windtunnel.network.mobilerate import live
from windtunnel.network.mobilerate.live.place import missing
from windtunnel.network.mobilerate.policy import POLICIES
from windtunnel.network.mobilerate.twin import emulate
from windtunnel.traces.bandwidth import GENERATORS

ARMS = ("sira-h", "sira-h-literal", "cubic", "reno", "bbr")


def live_rows(quick: bool) -> Iterator[Row]:
    """What of the link each used, and how long packets waited."""
    need(missing())
    repeats, seconds = (1, 5.0) if quick else (3, 20.0)
    for name in ("near-stationary", "driving"):
        trace = GENERATORS[name](seconds, np.random.default_rng(0))
        lacking = {arm: why for arm in ARMS if (why := live.lacking(arm))}
        for arm, why in lacking.items():
            yield left_out(f"{name}, {arm}", why)
        arms = [arm for arm in ARMS if arm not in lacking]
        rounds = in_turn({arm: partial(live.measure, trace, arm, seconds) for arm in arms}, repeats)
        for arm, tries in rounds.items():
            thrown, late = (
                sum(measured.thrown_away for measured in tries),
                max(max(measured.late) for measured in tries),
            )
            known = [measured.result for measured in tries if measured.result is not None]
            if not known:
                yield left_out(f"{name}, {arm}", f"all {thrown} tries came late")
                continue
            use, twin = spread(measured.use for measured in known).median, emulate(trace, arm, seconds)
            yield figure(
                f"{name}, {arm}: of the link", "%", use * 100, emulated=twin.use * 100,
                goal="within 10 % of the twin's" if arm in POLICIES else "",
                met=abs(use / twin.use - 1) <= 0.1,
                note=f"queue p95 {spread(measured.p95 for measured in known).median * 1e3:.0f} ms, twin's"
                f" {twin.p95 * 1e3:.0f} ms; {thrown} tries thrown away; at most {late * 1e3:.2f} ms late",
            )  # fmt: skip
