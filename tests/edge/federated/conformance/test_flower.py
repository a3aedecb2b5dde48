"""Flower's own programs on emulated devices, in groups and without; and a command that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import until
from windtunnel.linux import network, processes

pytestmark = [pytest.mark.conformance, pytest.mark.root, pytest.mark.xdist_group("flower")]
ROOT = Path(__file__).parents[4]
PYTHON = ROOT / os.environ.get("EDGE", ".edge") / "bin" / "python"
MARK = "WINDTUNNEL_FLOWER_TEST"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[dict[str, str]]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not (PYTHON.parent / "flwr").exists():
        pytest.skip(f"Flower is not installed in {PYTHON.parent.parent} (make .edge/ready)")
    mark = f"{MARK}={tmp_path}"
    yield {
        "WINDTUNNEL_HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT / "src"),
        MARK: str(tmp_path),
    }
    processes.kill_carrying(mark)
    network.sweep()


def command(*words: str) -> list[str]:
    code = "from windtunnel.cli.main import main; main()"
    return [str(PYTHON), "-c", code, "federated", "up", "--devices", "4", "--rounds", "2", "--json", *words]


def test_groups_learn_as_fedavg_does_and_spare_the_server(own: dict[str, str]) -> None:
    results = {}
    for groups in (0, 2):
        done = subprocess.run(
            command("--groups", str(groups), "--model-bytes", "2MB"),
            env=own,
            capture_output=True,
            timeout=350,
        )
        assert done.returncode == 0, done.stderr.decode()
        results[groups] = json.loads(done.stdout)
    flat, grouped = results[0], results[2]
    assert grouped["events"] == [] and len(grouped["accuracy"]) == 2
    assert grouped["accuracy"] == pytest.approx(flat["accuracy"], abs=0.01)  # float32 sums in another order
    assert flat["server_bytes"] / grouped["server_bytes"] > 1.7
    folder = Path(own["WINDTUNNEL_HOME"]) / "runs" / grouped["run"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    groups = [event["decision"]["groups"] for event in events if event["kind"] == "decision"]
    assert [len(each) for each in groups] == [2, 2]
    assert [event["means"] for event in events if event["kind"] == "effect"] == [2, 2]


def test_a_command_that_is_killed_leaves_no_process_and_no_network(own: dict[str, str]) -> None:
    before = set(os.listdir("/sys/class/net"))
    with subprocess.Popen(command("--groups", "2"), env=own, stdout=subprocess.DEVNULL) as process:
        logs = Path(own["WINDTUNNEL_HOME"]) / "runs"
        until(lambda: list(logs.glob("*/device-3.log")), "the last device's start")
        process.send_signal(signal.SIGKILL)
    until(lambda: not processes.carrying(f"{MARK}={own[MARK]}"), "the end of all that it started")
    until(lambda: set(os.listdir("/sys/class/net")) <= before, "the end of its network")
