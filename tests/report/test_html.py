"""The page: whole, self-contained, safe against what a run may contain, and true to its arrays."""

import base64
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_examples import heat_map, memory_curves, summary, timeline

from windtunnel.report import html
from windtunnel.report.html import write_report
from windtunnel.report.timeline import HeatMap, Timeline, Track

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps text, identifiers and addresses."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "action"):
                self.addresses.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] in (["script"], ["style"]) else self.words).append(data)


def _page(path: Path, known: dict[str, Any], *parts: Any, **more: Any) -> tuple[Page, dict[str, Any]]:
    write_report(path, known, *parts, **more)
    content = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', content, re.S)
    assert data
    return Page(content), json.loads(data[1])


def _array(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def test_it_needs_nothing_else(tmp_path: Path) -> None:
    page, _ = _page(
        tmp_path / "run" / "report.html",
        summary(),
        timeline(),
        memory_curves(),
        heat_map(),
        picture="[0] <host>",
    )
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert not re.search(r"https?://|@import|url\(", "".join(page.scripts))
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    words = " ".join(page.words)
    for expected in (
        "2.82 s",
        "does not fit",
        "148 GB/s",
        "[0] <host>",
        "1.0 <not computed>",
        "0-63",
        "option cluster",
    ):
        assert expected in words
    assert "None" not in words


def test_spans_survive_packing(tmp_path: Path) -> None:
    given = timeline(ranks=3, spans=200)
    _, data = _page(tmp_path / "r.html", summary(), given)
    packed = data["timeline"]
    start, width = (
        _array(packed["start"], "<u4") * packed["tick"],
        _array(packed["width"], "<u4") * packed["tick"],
    )
    name, kind = _array(packed["name"], "<u2"), _array(packed["kind"], "u1")
    assert len(start) == sum(map(len, given.tracks))
    for row, track in zip(packed["tracks"], given.tracks, strict=True):
        part = slice(row["begin"], row["end"])
        assert (row["rank"], row["queue"]) == (track.rank, track.queue)
        np.testing.assert_allclose(start[part], track.start, atol=2e-9)
        np.testing.assert_allclose(start[part] + width[part], track.end, atol=2e-9)
        np.testing.assert_array_equal(name[part], track.name)
        np.testing.assert_array_equal(kind[part], track.kind)


def test_a_large_timeline_is_cut_to_whole_ranks_and_says_so(tmp_path: Path) -> None:
    page, data = _page(
        tmp_path / "r.html", summary(), timeline(ranks=10, spans=30_000), memory_curves(), heat_map(1024)
    )
    assert data["timeline"]["ranks"] == [0, 16]
    assert "2 of 10 ranks are shown" in " ".join(page.words)
    assert (tmp_path / "r.html").stat().st_size < 6e6


def test_a_rank_that_is_too_long_loses_its_shortest_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_SPANS", 100)
    given = timeline(ranks=1, spans=200)
    packed, note = html.pack_timeline(given)
    assert packed and "left out" in note
    width = np.sort(_array(packed["width"], "<u4") * packed["tick"])
    longest = np.sort(np.concatenate([track.end - track.start for track in given.tracks]))[-100:]
    np.testing.assert_allclose(width, longest, atol=2e-9)


def test_memory_keeps_its_peak_and_the_tightest_comes_first(tmp_path: Path) -> None:
    curves = memory_curves(points=5000)
    curves[0].allocated[3333] = 93.0 * 2**30
    _, data = _page(tmp_path / "r.html", summary(), None, curves)
    assert [curve["label"] for curve in data["memory"]] == ["pp=1", "pp=0"]
    columns = data["memory"][1]["columns"]
    allocated, time = _array(columns["allocated"], "<f4"), _array(columns["time"], "<f4")
    assert len(allocated) <= html.CURVE_POINTS
    assert allocated.max() == pytest.approx(93.0 * 2**30) and time[allocated.argmax()] == pytest.approx(
        3333 / 4999
    )
    assert (np.diff(time) > 0).all() and time[0] == 0 and time[-1] == 1


def test_a_device_without_a_known_limit_keeps_the_data_readable(tmp_path: Path) -> None:
    _, data = _page(tmp_path / "r.html", summary(), None, [replace(memory_curves()[0], capacity=math.inf)])
    assert data["memory"][0]["capacity"] is None


def test_the_heat_map_has_every_rank_and_holes(tmp_path: Path) -> None:
    value = np.array([[1.0, 2.0], [4.0, np.nan]])
    page, data = _page(tmp_path / "r.html", summary(), heat_map=HeatMap("Busy", value, "s"))
    np.testing.assert_array_equal(_array(data["heat"]["value"], "<f4"), value.ravel())
    assert "least 1.00 s (rank 0, host 0), mean 2.33 s, most 4.00 s (rank 2, host 1)" in " ".join(page.words)
    _, data = _page(tmp_path / "r.html", summary(), heat_map=HeatMap("Busy", value * np.nan, "s"))
    assert data["heat"] is None


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><b x="y">&amp;'
    known = json.loads(json.dumps(summary()).replace("all_gather", json.dumps(evil)[1:-1]))
    known |= {"warnings": [evil], "command": {"script": evil, "args": [evil], "options": {evil: evil}}}
    known["ranks"][0]["name"] = known["ranks"][0]["peak_at"][0]["scope"] = evil
    known["operators"][0]["name"] = known["cluster"]["device"] = evil
    row = np.zeros(1, np.int32)
    spans = Timeline([Track(0, evil, np.zeros(1), np.ones(1), row, row)], [evil])
    page, data = _page(tmp_path / "r.html", known, spans, picture=evil)
    assert data["timeline"]["names"] == [evil]
    assert sum(evil in words for words in page.words) >= 6
    assert not any("alert(1)</script" in script for script in page.scripts)
    assert (tmp_path / "r.html").read_text().count("<script") == 2


def test_what_is_not_given_is_left_out(tmp_path: Path) -> None:
    page, data = _page(tmp_path / "r.html", {"iteration_time_s": 1.0})
    assert data == {"timeline": None, "memory": [], "heat": None}
    assert "timeline" not in page.ids and "heat" not in page.ids and "memory" not in page.ids
    _page(tmp_path / "r.html", summary(), Timeline([], []), [], None)


def test_what_runs_out_of_memory_comes_before_everything_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, summary())
    body = path.read_text(encoding="utf-8").partition("<body>")[2]
    shown = re.sub(r"<[^>]+>", " ", body).split()
    assert shown[:4] == ["out", "of", "memory:", "layers.15.feed_forward"]
    assert '<p class="alarm" role="alert">' in body
    known = summary()
    for rank in known["ranks"]:
        rank["oom"] = None
    write_report(path, known)
    assert 'class="alarm"' not in path.read_text(encoding="utf-8")


def test_warnings_come_before_figures_of_time_and_modules_have_a_table(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    times = {
        "forward": 2e-3,
        "backward": 4e-3,
        "recompute": 0.0,
        "in all": 6e-3,
        "flops": 3e12,
        "bytes": 2**20,
    }
    modules = [{"name": "layers.*.mlp", **times}, {"name": "idle", **dict.fromkeys(times, 0.0)}]
    write_report(path, summary() | {"warnings": ["mind this"], "approximations": ["near"]}, modules=modules)
    body = path.read_text(encoding="utf-8").partition("<main")[2]
    places = [
        body.index(f'<section id="{name}"')
        for name in ("warnings", "figures", "path", "modules", "approximations")
    ]
    assert places == sorted(places)
    table = body[places[3] :].partition("</section>")[0]
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", table))
    assert "module forward backward in all share FLOP bytes" in shown, (
        "phases in which nothing runs are left out"
    )
    assert "layers.*.mlp 2.00 ms 4.00 ms 6.00 ms 100.0 %" in shown and "idle" not in shown
