"""Meta's HolisticTraceAnalysis reads the trace of a rank, and finds the times that the summary has."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import PROGRAMS

from support import quick
from support.traces import read_trace
from windtunnel.report.timeline import Timeline

GROUPED = True


def _copies(path: str) -> set[tuple[int, int]]:
    """From when to when copies between host and device go on, in nanoseconds: no computation for it, but work
    of the device for both."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return {
        (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in events
        if event.get("cat") == "gpu_memcpy"
    }


def _covered(
    timeline: Timeline, rank: int, kinds: set[str], without: Collection[tuple[int, int]] = ()
) -> list[tuple[float, float]]:
    """The spans of these kinds of one rank, joined where they touch."""
    spans = sorted(
        (start, end)
        for track in timeline.tracks
        if track.rank == rank and track.queue != "host"
        for start, end, kind in zip(track.start, track.end, track.kind, strict=True)
        if timeline.kinds[kind] in kinds and (round(start * 1e9), round(end * 1e9)) not in without
    )
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1] + 1e-12:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _seconds(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _overlap(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def test_its_breakdown_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pandas would take the folder of tests of that name for the package
    monkeypatch.setitem(sys.modules, "bottleneck", None)
    analysis: Any = pytest.importorskip(
        "hta.trace_analysis", reason="pip install --no-deps HolisticTraceAnalysis"
    )
    done = quick.windtunnel(
        "emulate", "--json", "--jobs", "1", "--cluster", "h100-sxm:2x8",
        PROGRAMS / "fsdp1_train.py", "--batch", "16", "--sequence", "1024", lent=quick.STRANGERS,
        env={"WINDTUNNEL_HOME": str(tmp_path / "home")}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    folder = Path(summary["directory"])
    ours = read_trace(folder / "timeline.json.gz")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    files = {rank: str(folder / "trace" / f"rank-{rank}.json.gz") for rank in ours.ranks()}
    theirs = analysis.TraceAnalysis(trace_files=files, trace_dir=str(folder / "trace"))
    times = theirs.get_temporal_breakdown(visualize=False).set_index("rank")
    overlaps = theirs.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    assert sorted(times.index) == sorted(files) and summary["critical_rank"] in files
    for rank in files:
        compute = _covered(ours, rank, {"compute"}, _copies(files[rank]))
        communication = _covered(ours, rank, {"communication", "idle"})
        kernels = _covered(ours, rank, {"compute", "communication", "idle"})
        whole = kernels[-1][1] - kernels[0][0]
        theirs_of = times.loc[rank]
        for name, seconds in (
            ("kernel_time(us)", whole), ("compute_time(us)", _seconds(compute)),
            ("idle_time(us)", whole - _seconds(kernels)),
            ("non_compute_time(us)", _seconds(kernels) - _seconds(compute)),
        ):  # fmt: skip
            assert math.isclose(theirs_of[name] * 1e-6, seconds, rel_tol=1e-6, abs_tol=1e-7), name
        assert _overlap(communication, compute) > 0
        share = 100 * _overlap(communication, compute) / _seconds(communication)
        assert overlaps[rank] == pytest.approx(share, abs=0.01)
    every = _seconds(_covered(ours, summary["critical_rank"], {"compute"}))
    assert every == pytest.approx(summary["critical_path"]["compute"], rel=1e-5)
    assert np.isfinite(theirs.get_idle_time_breakdown(visualize=False)[0]["idle_time"]).all()
