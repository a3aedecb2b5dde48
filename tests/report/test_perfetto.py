"""Trace files: read back with the plain JSON reader."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from report_examples import timeline

from windtunnel.report.timeline import Timeline, Track, read_trace, write_trace


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_every_span_is_there_with_its_names(tmp_path: Path) -> None:
    given = timeline(ranks=3, spans=50)
    write_trace(tmp_path / "t" / "timeline.json.gz", given)
    events = _events(tmp_path / "t" / "timeline.json.gz")
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 16: "rank 16", 32: "rank 32"}
    found = [
        (e["pid"], labels[e["pid"], e["tid"]], e["name"], e["cat"], e["ts"] * 1e-6, e["dur"] * 1e-6)
        for e in events
        if e["ph"] == "X"
    ]
    expected = [
        (track.rank, track.queue, given.names[name], given.kinds[kind], start, end - start)
        for track in given.tracks
        for start, end, name, kind in zip(track.start, track.end, track.name, track.kind, strict=True)
    ]
    assert [one[:4] for one in found] == [one[:4] for one in expected]
    np.testing.assert_allclose([one[4:] for one in found], [one[4:] for one in expected], atol=1.1e-9)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    given = timeline(ranks=3, spans=50)
    write_trace(tmp_path / "timeline.json.gz", given)
    found = read_trace(tmp_path / "timeline.json.gz")
    assert found.ranks() == given.ranks()
    for before, after in zip(given.tracks, found.tracks, strict=True):
        assert (after.rank, after.queue) == (before.rank, before.queue)
        assert [found.names[one] for one in after.name] == [given.names[one] for one in before.name]
        assert [found.kinds[one] for one in after.kind] == [given.kinds[one] for one in before.kind]
        np.testing.assert_allclose(after.start, before.start, atol=1.1e-9)
        np.testing.assert_allclose(after.end, before.end, atol=1.1e-9)


def test_spans_that_touch_do_not_overlap(tmp_path: Path) -> None:
    edges = np.cumsum(np.random.default_rng(3).random(200) * 1e-7) + 1000.0
    row = np.zeros(199, np.int32)
    write_trace(
        tmp_path / "x.json.gz", Timeline([Track(0, "compute", edges[:-1], edges[1:], row, row)], ["a"])
    )
    spans = [(e["ts"], e["dur"]) for e in _events(tmp_path / "x.json.gz") if e["ph"] == "X"]
    for (start, lasting), (following, _) in pairwise(spans):
        assert round((start + lasting) * 1000) == round(following * 1000)


def test_equal_timelines_give_equal_bytes_and_nothing_is_a_trace_too(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, timeline(ranks=2, spans=30))
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    write_trace(tmp_path / "c.json.gz", Timeline([], []))
    assert _events(tmp_path / "c.json.gz") == []
