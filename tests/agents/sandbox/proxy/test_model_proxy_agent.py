"""The coding agent of the examples, a real process with a real shell, behind the model proxy."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_turns import FakeBox
from model_bench import Bench

from windtunnel.agents.sandbox.proxy.server import ModelProxy

AGENTS = Path(__file__).parents[4] / "examples" / "agents"


@contextlib.contextmanager
def scripted_server(steps: list[str], *, think: float = 0.0) -> Iterator[Any]:
    """The scripted model of the examples, with these steps."""
    spec = importlib.util.spec_from_file_location("scripted_model", AGENTS / "scripted_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.Server(0, steps, think)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Any]:
    steps = [
        f"cd {tmp_path} && export KEPT=yes",
        "echo one >> notes",
        "cat notes; pwd; echo $KEPT",
        "exit_status() { return 3; }; exit_status",
    ]
    with scripted_server(steps) as server:
        yield server


def agent(bench: Bench, box: FakeBox) -> str:
    """Run the agent to its end; what it printed."""
    environment = os.environ | {"OPENAI_BASE_URL": bench.url(box, "/v1"), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(AGENTS / "coding_agent.py"), "take notes"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_agent_ends_its_turns_and_is_replayed(
    bench: Bench, proxy: ModelProxy, scripted: Any, tmp_path: Path
) -> None:
    box = bench.serve(proxy, FakeBox(), upstream=f"http://127.0.0.1:{scripted.server_port}/v1")
    told = agent(bench, box)
    assert told.splitlines()[-1] == "Done."
    assert f"one\n{tmp_path}\nyes\n[exit status 0]" in told
    assert "[exit status 3]" in told
    assert box.turns == 5
    assert scripted.asked == 5
    (tmp_path / "notes").unlink()
    proxy.restored(box.name, 0, on_purpose=False)
    box.back_to(0)
    assert agent(bench, box) == told
    assert scripted.asked == 5, "the second life asked the model for nothing"
    assert box.turns == 5
