"""The log of a real vLLM server: decided anew, done as decided, and decided by the twin."""

from __future__ import annotations

import lzma
from importlib.util import find_spec
from pathlib import Path

import pytest

from parity.serving import branching_effects, engine_effects, engine_twin, in_time
from support.vllm_server import RECORDED, requests, run
from windtunnel.replay import replay
from windtunnel.serving.vllm.calibrate import fit_log
from windtunnel.store import eventlog


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / eventlog.NAME
    path.write_bytes(lzma.decompress(RECORDED.read_bytes()))
    return path


def held(path: Path) -> None:
    parts = replay(path).parts
    assert {part.capability for part in parts} == {"serving.engine", "serving.branching"}
    assert all(part.differences == [] for part in parts)
    events = eventlog.read(path)
    assert engine_effects(events) == []
    assert branching_effects(events) == []
    pairs = engine_twin([*in_time(events), {"kind": "drawn"}])
    assert len(pairs) > 20
    assert all(live == twin for live, twin in pairs)


def test_the_recorded_log_holds(log: Path) -> None:
    held(log)


def test_its_steps_give_a_step_model(log: Path) -> None:
    time, _ = fit_log(eventlog.read(log))
    assert 0 < time.of(1, 100) < time.of(8, 100, [(64, 64)])


@pytest.mark.conformance
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_live_server_does_what_it_decides(tmp_path: Path) -> None:
    path, status = run(tmp_path)
    assert sorted(status) == [200] * (2 * len(requests()) - 2) + [503] * 2
    held(path)
