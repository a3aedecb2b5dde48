"""The frame of all pages: nothing from elsewhere, everything escaped, plotly.js once where charts are."""

from __future__ import annotations

import re

from windtunnel.report.page import figure, heading, page, plot


def test_a_page_needs_nothing_else_and_escapes_what_it_is_given() -> None:
    text = page("<b>", ["a & b"], [("one", "One", heading("<i>", "x<y")), ("two", "Two", "")], footer="<f>")
    assert "<h1>&lt;b&gt;</h1>" in text
    assert "<p>a &amp; b</p>" in text
    assert "<h2>&lt;i&gt; <small>x&lt;y</small></h2>" in text
    assert "&lt;f&gt;" in text
    assert 'id="two"' not in text  # a section without content is left out
    assert "<nav" not in text  # and one alone needs no navigation
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?!data:)", text)
    assert len(text) < 20_000


def test_charts_share_one_library() -> None:
    charts = [figure("x", "y"), figure("x", "z", barmode="stack", yaxis_rangemode="tozero")]
    for chart in charts:
        chart.add_scatter(x=[1, 2], y=[3, 4])
    text = page("t", [], [(str(i), "c", plot(chart)) for i, chart in enumerate(charts)], plots=True)
    assert text.count("Plotly.newPlot(") >= 2
    assert len(re.findall(r"plotly\.js v\d", text)) == 1
    assert "<nav" in text
    assert charts[1].layout.yaxis.title.text == "z"
    assert charts[1].layout.yaxis.rangemode == "tozero"
