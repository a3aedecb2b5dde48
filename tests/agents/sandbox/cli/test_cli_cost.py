"""A call of the command line imports what it needs, and reads its arguments as Typer does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.agents.sandbox.client import Client
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.cli.main import app

CLI = (sys.executable, "-X", "importtime", str(Path(__file__).parent / "fakecli.py"), "sandbox")
HEAVY = {
    "asyncio", "fastapi", "fsspec", "httpcore", "httpx", "networkx", "numba", "numpy", "pandas", "plotly",
    "pydantic", "pydantic_core", "rich", "scipy", "sqlalchemy", "ssl", "torch", "uvicorn", "yaml",
}  # fmt: skip


def imported(*words: str) -> tuple[set[str], int]:
    """The packages that a call loaded, and its exit status."""
    done = subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=60)
    lines = (line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line)
    return {line.partition(".")[0] for line in lines}, done.returncode


def test_calls_load_nothing_heavy(client: Client) -> None:
    client.create(SandboxSpec("a"))
    home = ("--home", str(client.place.home))
    for call in (
        ["ls"],
        ["log", "a"],
        ["exec", "a", "--timeout", "60", "--", "true"],
        ["checkpoint", "a", "--full", "--label", "b"],
        ["fork", "a", "--count", "2", "--name", "f", "--json"],
        ["restore", "a"],
        ["create", "c", "--env", "A=b", "--env", "C=d"],
        ["rm", "--yes", "c", "f-1"],
    ):
        loaded, status = imported(*home, *call)
        assert (call, sorted(loaded & HEAVY), status) == (call, [], 0)
        assert "typer" in loaded
    assert client.get("f-2").info().base
    loaded, status = imported("nope")
    assert (sorted(loaded & HEAVY), status) == ([], 2)


LONG = "/tmp/" + "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["--home", LONG, "ls"],
        ["put", "a", LONG, "/file"],
        ["get", "a", "/file", LONG],
        ["get", "a", "/file", "/proc/nothing/file"],
        ["export", "a", ""],
        ["import", " ", "b"],
        ["--url", "http://127.0.0.1:1", "ls"],
        ["--url", "tcp://127.0.0.1:99999", "ls"],
    ],
)
def test_files_and_urls_that_cannot_be_are_refused_in_a_sentence(
    client: Client, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    client.create(SandboxSpec("a")).put("/file", b"1")
    monkeypatch.setenv("WINDTUNNEL_SANDBOX_HOME", str(client.place.home))
    monkeypatch.setenv("WINDTUNNEL_SANDBOX_TOKEN", "x")
    done = subprocess.run([CLI[0], *CLI[3:], *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("windtunnel: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fork", "a", "--count", "0"], "greater than or equal to 1"),
        (["fork", "a", "--count", "1.5"], "integer"),
        (["exec", "a", "--timeout", "-1", "--", "true"], "greater than or equal to 0.001"),
        (["exec", "a", "--timeout", "soon", "--", "true"], "number"),
        (["serve", "--nope"], "--nope"),
        (["rm"], "NAME"),
    ],
)
def test_arguments_that_are_wrong_are_refused_as_ever(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["sandbox", *words])
    assert done.exit_code == 2
    assert said in done.output
