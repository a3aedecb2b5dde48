"""Trace files: read back with the plain JSON reader."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from report_examples import timeline

from support.traces import read_trace
from windtunnel.report.timeline import About, Timeline, Track, write_trace


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_every_span_is_there_with_its_names(tmp_path: Path) -> None:
    given = timeline(ranks=3, spans=50)
    write_trace(tmp_path / "t" / "timeline.json.gz", given)
    events = _events(tmp_path / "t" / "timeline.json.gz")
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 16: "rank 16", 32: "rank 32"}
    spans = [
        (e["pid"], labels[e["pid"], e["tid"]], e["name"], e["cat"], e["ts"] * 1e-6, e["dur"] * 1e-6)
        for e in events
        if e["ph"] == "X"
    ]
    expected = [
        (track.rank, track.queue, given.names[name], given.kinds[kind], start, end - start)
        for track in given.tracks
        for start, end, name, kind in zip(track.start, track.end, track.name, track.kind, strict=True)
    ]
    assert [span[:4] for span in spans] == [span[:4] for span in expected]
    np.testing.assert_allclose([span[4:] for span in spans], [span[4:] for span in expected], atol=1.1e-9)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    given = timeline(ranks=3, spans=50)
    write_trace(tmp_path / "timeline.json.gz", given)
    restored = read_trace(tmp_path / "timeline.json.gz")
    assert restored.ranks() == given.ranks()
    for before, after in zip(given.tracks, restored.tracks, strict=True):
        assert (after.rank, after.queue) == (before.rank, before.queue)
        assert [restored.names[number] for number in after.name] == [
            given.names[number] for number in before.name
        ]
        assert [restored.kinds[number] for number in after.kind] == [
            given.kinds[number] for number in before.kind
        ]
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


def test_what_is_known_of_spans_is_written_and_the_page_s_timeline_is_read_again(tmp_path: Path) -> None:
    about = [
        About("aten::mm", "kernel", {"operator": "aten.mm.default"}, "aten::mm"),
        About("ncclDevKernel_AllReduce", "kernel",
              {"Collective name": "all_reduce", "Process Group Description": "dp"}, "c10d::all_reduce"),
        About("cudaStreamSynchronize", "cuda_runtime", {}),
    ]  # fmt: skip
    names = ["aten.mm.default", "wait for all_reduce dp", "all_reduce dp", "cudaStreamSynchronize"]
    kinds = ["compute", "idle", "communication", "host"]
    rows = np.arange(4, dtype=np.int32)
    start, end = np.arange(4) * 1e-6, np.arange(1, 5) * 1e-6
    issued = np.array([[-1.0, -1.0, 0.5e-6, 3e-6], [-1.0, -1.0, 0.75e-6, 3e-6]])
    track = Track(3, "compute", start, end, rows, rows, np.array([0, -1, 1, 2], np.int32), issued)
    memory = (np.array([0.0, 2e-6]), np.array([512.0, 1024.0]), np.array([2048.0, 2048.0]))
    given = Timeline([track], names, kinds, about, {3: memory}, (7, 4e-6))
    write_trace(tmp_path / "timeline.json.gz", given, tmp_path / "trace")
    whole, alone = (_events(tmp_path / name) for name in ("timeline.json.gz", "trace/rank-3.json.gz"))
    assert whole == alone, "of one rank"
    kernels = [event for event in whole if event.get("cat") == "kernel"]
    assert [(event["ts"], event["dur"]) for event in kernels] == [(0, 1), (1, 2)]
    assert kernels[1]["args"]["Waiting (us)"] == 1, "a collective begins where it is ready"
    assert [event["ts"] for event in whole if event.get("cat") == "ac2g"] == [0.5, 1]
    assert [event["args"]["allocated"] for event in whole if event["ph"] == "C"] == [512, 1024]
    assert [event["name"] for event in whole if event.get("cat") == "user_annotation"] == ["ProfilerStep#7"]
    copy = read_trace(tmp_path / "timeline.json.gz")
    (again,) = copy.tracks
    assert [copy.names[row] for row in again.name] == names
    assert [copy.kinds[row] for row in again.kind] == kinds
    np.testing.assert_allclose(again.start, start, atol=1e-10)
