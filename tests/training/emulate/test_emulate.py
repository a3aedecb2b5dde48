"""The whole path, from the command line to the files of a run, on the debug Llama."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.traces import read_trace
from windtunnel.base import ranges
from windtunnel.cli.main import app
from windtunnel.report.chakra import read_graph
from windtunnel.store.runs import Store

ROOT = Path(__file__).parents[3]
LLAMA = str(ROOT / "examples" / "train_llama.py")
BATCH, SEQ = 2, 64
JOB = ("--cluster", "h100-sxm:2x4", "--json", "--no-report", LLAMA, "--size", "debug", "--seq", str(SEQ))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        yield folder


def emulate(*words: str) -> Result:
    return CliRunner().invoke(app, ["emulate", *words])


def summary_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def fsdp(home: Path) -> dict[str, Any]:
    return summary_of(emulate(*JOB[:3], *JOB[4:], "--batch", str(BATCH)))


@pytest.fixture(scope="module")
def pipeline(home: Path) -> dict[str, Any]:
    return summary_of(emulate(*JOB, "--pp", "2", "--tp", "2"))


def test_parts_add_up(fsdp: dict[str, Any], pipeline: dict[str, Any]) -> None:
    for summary in (fsdp, pipeline):
        assert math.isclose(sum(summary["critical_path"].values()), summary["iteration_time_s"], rel_tol=1e-9)
        ranks = sorted(rank for row in summary["ranks"] for rank in ranges.read(row["members"]))
        assert ranks == list(range(summary["world_size"]))
        for row in summary["ranks"]:
            assert (
                sum(row["by_category"].values()) == row["peak_allocated_bytes"] <= row["peak_reserved_bytes"]
            )
    assert pipeline["critical_path"]["pipeline_bubble"] > 0
    assert {row["name"].split()[0] for row in pipeline["ranks"]} == {"pp=0", "pp=1"}


def test_tokens_are_those_of_all_data_parallel_ranks(fsdp: dict[str, Any], pipeline: dict[str, Any]) -> None:
    assert fsdp["tokens_per_iteration"] == 8 * BATCH * SEQ
    # Two of eight ranks are data parallel beside two stages and two tensor parallel ranks; four microbatches.
    assert pipeline["tokens_per_iteration"] == 2 * 4 * SEQ


def test_files_of_a_run(fsdp: dict[str, Any]) -> None:
    assert not {"confidential", "live"} & set(fsdp)
    folder = Path(fsdp["directory"])
    assert json.loads((folder / "summary.json").read_text())["run_id"] == fsdp["run_id"]
    with gzip.open(folder / "timeline.json.gz", "rt") as file:
        assert any(event["ph"] == "X" for event in json.load(file)["traceEvents"])
    assert fsdp["run_id"] in (folder / "report.html").read_text(encoding="utf-8")
    graphs = [read_graph(path) for path in sorted((folder / "graph").glob("*.et"))]
    assert len(graphs) == len(fsdp["ranks"])
    assert all(len(graph) for graph in graphs)
    run = Store.open().get(fsdp["run_id"])
    assert run.status == "done"
    assert run.summary is not None
    assert run.summary["iteration_time_s"] == fsdp["iteration_time_s"]


def test_the_trace_of_a_rank_is_as_the_profiler_s(fsdp: dict[str, Any]) -> None:
    folder = Path(fsdp["directory"])
    (path,) = (folder / "trace").glob("*.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    rank = trace["distributedInfo"]["rank"]
    assert path.name == f"rank-{rank}.json.gz"
    kernels = [event for event in events if event.get("cat") == "kernel"]
    launches = {
        event["args"].get("correlation"): event for event in events if event.get("cat") == "cuda_runtime"
    }
    operators = {event["args"]["External id"]: event for event in events if event.get("cat") == "cpu_op"}
    begins, ends = ({event["id"]: event for event in events if event["ph"] == ph} for ph in "sf")
    assert len(begins) == len(ends) == len(operators) > len(kernels) // 2
    for event in kernels:
        args = event["args"]
        number = args["correlation"]
        assert {"stream", "device", "External id", "module", "step", "phase"} <= set(args)
        if number in begins:  # else it was issued before the window
            launch = launches[number]
            assert begins[number]["ts"] == launch["ts"] and ends[number]["ts"] == event["ts"]
            assert round(1000 * (launch["ts"] + launch["dur"])) <= round(1000 * event["ts"])
    product = next(event for event in kernels if event["name"] == "aten::mm")
    (m, k), (_, n) = product["args"]["Input Dims"]
    assert product["args"]["FLOP"] == 2 * m * n * k and product["args"]["bytes"] > 0
    assert any("layers" in event["args"]["module"] for event in kernels)
    gathers = [event for event in kernels if event["name"] == "ncclDevKernel_AllGather"]
    assert all(event["args"]["Process Group Description"] == "world" for event in gathers)
    transfer = sum(event["dur"] - event["args"].get("Waiting (us)", 0) for event in gathers)
    expected = sum(row["seconds_total"] for row in fsdp["collectives"] if row["kind"] == "all_gather")
    assert math.isclose(transfer * 1e-6, expected, rel_tol=1e-4)
    (step,) = (event for event in events if event.get("cat") == "user_annotation")
    assert re.fullmatch(r"ProfilerStep#\d+", step["name"])
    assert math.isclose(step["dur"] * 1e-6, fsdp["iteration_time_s"], rel_tol=1e-6)
    held = [event["args"]["allocated"] for event in events if event["ph"] == "C"]
    assert max(held) == max(row["peak_allocated_bytes"] for row in fsdp["ranks"])
    again = read_trace(folder / "timeline.json.gz")
    assert {"compute", "communication"} <= set(again.kinds) and "all_gather world" in again.names
