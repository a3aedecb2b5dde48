"""A call of the command line imports what it needs, and reads its arguments as Typer does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from windtunnel.agents.sandbox.client import Client
from windtunnel.agents.sandbox.model import SandboxSpec

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
        ["create", "c", "--env", "A=b", "--env", "C=d"],
        ["exec", "a", "--timeout", "60", "--", "true"],
        ["checkpoint", "a", "--full", "--label", "b"],
    ):
        loaded, status = imported(*home, *call)
        assert (call, sorted(loaded & HEAVY), status) == (call, [], 0)
        assert "typer" in loaded
    loaded, status = imported("nope")
    assert (sorted(loaded & HEAVY), status) == ([], 2)
