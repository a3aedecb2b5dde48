"""The what-ifs as rows of a table, and as a page with one picture."""

from __future__ import annotations

from html import escape
from pathlib import Path

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.units import seconds, share
from windtunnel.report.page import figure, heading, page, plot
from windtunnel.training.bottleneck.run import GBIT, Analysis, WhatIfPoint, gigabits

_AS_GIGABITS = ("as it is", "full use", "bandwidth", "capped transport")


HEAD = ("what if", "", "iteration", "scaling factor", "of the NICs used")
LIVE_HEAD = ("ranks", "links", "step, nothing sent", "iteration", "scaling factor", "emulated, as fast alone")


def rows(analysis: Analysis) -> list[tuple[str, ...]]:
    """One for each what-if, as `HEAD` has it."""
    return [
        (point.what, _value(point), seconds(point.iteration), share(point.scaling), share(point.used))
        for point in _ordered(analysis.points)
    ]


def live_rows(analysis: Analysis) -> list[tuple[str, ...]]:
    """One for each run on this machine, as `LIVE_HEAD` has it."""
    return [
        (
            f"{point.ranks}", gigabits(point.rate), seconds(point.alone), seconds(point.iteration),
            share(point.measured), share(point.emulated),
        )
        for point in analysis.live
    ]  # fmt: skip


def needs(analysis: Analysis) -> list[str]:
    """A line for each target."""
    return [
        f"a scaling factor of {target} needs "
        + (gigabits(bandwidth) if bandwidth else "what no NIC has")
        + ", or "
        + (f"a free compression of {ratio:g}" if ratio else "what no compression gives")
        for target, (bandwidth, ratio) in analysis.needs.items()
    ]


def write_page(path: Path, analysis: Analysis) -> None:
    """One HTML file that needs nothing else.

    Raises:
        UserError: it cannot be written.
    """
    chart = figure("Gb/s of a NIC", "scaling factor", xaxis_type="log", yaxis_range=[0, 1.02])
    for what in ("bandwidth", "compression", "compression, with its cost"):
        points = sorted(
            (point for point in analysis.points if point.what == what), key=lambda point: point.value
        )
        factor = 1 / GBIT if what == "bandwidth" else analysis.points[0].value / GBIT
        chart.add_scatter(
            x=[point.value * factor for point in points], y=[point.scaling for point in points],
            mode="lines+markers", name=what,
        )  # fmt: skip
    chart.add_vline(x=analysis.points[0].value / GBIT, line_dash="dot", line_color="#999")
    lines = "".join(f"<li>{escape(line)}</li>" for line in needs(analysis))
    body = f"{heading('Scaling factor')}{plot(chart)}<ul>{lines}</ul>"
    text = page(
        f"Network of {analysis.cluster}", [analysis.sentence(), "Everything on this page is emulated."],
        [("scaling", "Scaling", body)], plots=True,
    )  # fmt: skip
    try:
        atomic.replace(path, text)
    except OSError as error:
        raise UserError(f"bottleneck: --html {path} cannot be written: {error.strerror}") from None


def _ordered(points: list[WhatIfPoint]) -> list[WhatIfPoint]:
    order = list(dict.fromkeys(point.what for point in points))
    return sorted(points, key=lambda point: (order.index(point.what), point.value))


def _value(point: WhatIfPoint) -> str:
    return gigabits(point.value) if point.what in _AS_GIGABITS else f"{point.value:g}"
