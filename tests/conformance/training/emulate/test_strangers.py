"""Each stranger is emulated unmodified, by the command, and the page of frameworks shows what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from catalogue import PROGRAMS, STRANGERS, TORCH, Stranger, row, shown, write

from support import quick

GROUPED = True  # one server has what they all import
WEIGHTS = {".ckpt", ".distcp", ".pt", ".safetensors"}
"""What the names of files of weights end with."""


@pytest.mark.slow
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.name)
def test_it_is_emulated(stranger: Stranger, tmp_path: Path) -> None:
    if stranger.missing:
        pytest.skip(f"needs {', '.join(stranger.missing)}: pip install windtunnel[strangers]")
    done = quick.windtunnel(
        "emulate", "--json", "--no-report", "--jobs", "1", "--cluster", stranger.cluster,
        PROGRAMS / stranger.program, *stranger.arguments, lent=quick.STRANGERS,
        env=dict(stranger.settings) | {"WINDTUNNEL_HOME": str(tmp_path / "home")}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert summary["tokens_per_iteration"] == stranger.tokens
    assert 0 < summary["mfu"] <= summary["hfu"] <= 1
    assert all(rank["fits"] for rank in summary["ranks"])
    assert not [word for word in summary["warnings"] if "came twice" in word]
    files = [path.name for path in tmp_path.rglob("*") if path.suffix in WEIGHTS]
    assert files == [], "there are no weights to write"
    line = row(stranger, summary)
    if os.environ.get("WINDTUNNEL_WRITE_DOCS"):
        write(stranger.name, line)
    kept = shown()[stranger.name]
    if version("torch").startswith(TORCH) and f"| {stranger.versions} |" in kept:  # others may give others
        assert kept == line, "WINDTUNNEL_WRITE_DOCS=1 writes the line that came out"


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8b", "70b"])
def test_a_large_model_that_is_built_on_the_host_takes_little_memory(size: str, tmp_path: Path) -> None:
    stranger = next(entry for entry in STRANGERS if size in entry.arguments)
    if stranger.missing:
        pytest.skip(f"needs {', '.join(stranger.missing)}: pip install windtunnel[strangers]")
    done = subprocess.run(
        [
            sys.executable, "-c", "from windtunnel.cli.main import main; main()",
            "emulate", "--json", "--no-report", "--ranks", "0", "--cluster", stranger.cluster,
            str(PROGRAMS / stranger.program), *stranger.arguments,
        ],
        env=os.environ | dict(stranger.settings) | {"WINDTUNNEL_HOME": str(tmp_path / "home")},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["peak_rss_bytes"] < 2 << 30


def test_the_page_shows_them_all() -> None:
    assert list(shown()) == [stranger.name for stranger in STRANGERS]
