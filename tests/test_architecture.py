"""Imports point one way, and deciding code is pure: what CONTRIBUTING.md promises, held by the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "windtunnel"
CAPABILITIES = ("training", "serving", "agents", "data", "network", "control", "silicon", "trust", "edge")
GROUND = ("base", "linux", "engines", "cluster", "store", "report", "bench", "traces")
MODULES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it or only at its top level."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def inside(path: Path, *folder: str) -> bool:
    return path.relative_to(SOURCE).parts[: len(folder)] == folder


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    used = {
        name.removeprefix("windtunnel.").split(".")[0]
        for name in imports(path)
        if name.startswith("windtunnel.")
    }
    layer = path.relative_to(SOURCE).parts[0]
    if layer in GROUND:
        assert not used & {*CAPABILITIES, "cli"}
    elif layer in CAPABILITIES:
        assert "cli" not in used


@pytest.mark.parametrize("path", [p for p in MODULES if inside(p, "training", "emulate")], ids=name_of)
def test_rooms_of_emulate(path: Path) -> None:
    """policy decides which ranks to capture, twin (with its costs and memory) emulates, live captures."""
    used = imports(path)
    room = path.relative_to(SOURCE).parts[2]
    mine = "windtunnel.training.emulate."
    if room == "policy":
        assert not any(name.startswith((mine + "live", mine + "twin")) for name in used)
    if room in ("policy", "twin") and not inside(path, "training", "emulate", "twin", "cost"):
        assert not used & {"torch", "time", "socket", "subprocess", "os", "threading"}
    if room == "twin":
        assert not any(name.startswith(mine + "live") for name in used)
    if room == "live":
        assert not any(name.startswith((mine + "twin", "windtunnel.engines")) for name in used)


@pytest.mark.parametrize("path", [p for p in MODULES if inside(p, "agents", "sandbox")], ids=name_of)
def test_rooms_of_sandbox(path: Path) -> None:
    """twin emulates with the policy that live uses; neither knows the other; data know no room."""
    used = imports(path)
    room = path.relative_to(SOURCE).with_suffix("").parts[2]
    mine = "windtunnel.agents.sandbox."
    if room == "twin":
        assert not any(name.startswith(mine + "live") for name in used)
        assert not used & {"time", "socket", "subprocess", "threading", "asyncio"}
    if room == "live":
        assert not any(name.startswith((mine + "twin", "windtunnel.engines")) for name in used)
    if room in ("model", "policy", "costs", "views"):
        assert not any(name.startswith((mine + "twin", mine + "live", mine + "client")) for name in used)


SURVIVING = ("elastic", "checkpoint", "pipelines", "goodput")
# Where elastic is put together with what stands on it; the rest of elastic knows nothing of that.
COMPOSED = ("host", "session", "report")


@pytest.mark.parametrize(
    "path", [p for name in SURVIVING for p in MODULES if inside(p, "training", name)], ids=name_of
)
def test_rooms_of_surviving_training(path: Path) -> None:
    """elastic is the ground of checkpoint and pipelines; policies are pure; twins and live never meet."""
    used = imports(path)
    package, room = path.relative_to(SOURCE).with_suffix("").parts[1:3]
    mine = f"windtunnel.training.{package}."
    theirs = [f"windtunnel.training.{name}." for name in SURVIVING]
    if package == "elastic" and room not in COMPOSED:
        assert not any(name.startswith((theirs[1], theirs[2])) for name in used)
    if room == "twin":
        assert not any(name.startswith(tuple(f"{other}live" for other in theirs)) for name in used)
        assert not {name.split(".")[0] for name in used} & {
            "time",
            "socket",
            "subprocess",
            "threading",
            "torch",
        }
    if room == "live":
        assert not any(name.startswith((mine + "twin", "windtunnel.engines")) for name in used)
        strange = tuple(
            f"{other}{part}" for other in theirs[1:] if other != mine for part in ("live", "twin")
        )
        assert not any(name.startswith(strange) for name in used)
    if room in ("policy", "model", "events", "failures", "faults"):
        assert not any(name.startswith((mine + "live", mine + "twin")) for name in used)
        assert not {name.split(".")[0] for name in used} & {
            "torch",
            "time",
            "os",
            "socket",
            "subprocess",
            "threading",
        }


NO_TORCH = (
    "windtunnel.training.elastic.host", "windtunnel.training.elastic.live.supervise",
    "windtunnel.training.elastic.live.supervisor", "windtunnel.training.checkpoint.live.memory.service",
)  # fmt: skip


@pytest.mark.parametrize("module", NO_TORCH)
def test_what_must_outlive_trainers_needs_no_torch(module: str) -> None:
    code = f"import {module}, sys; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", [p for p in MODULES if inside(p, "cli")], ids=name_of)
def test_command_line_starts_without_heavy_libraries(path: Path) -> None:
    heavy = {"torch", "numba", "plotly", "sqlalchemy", "ray", "pandas"}
    assert not {name.split(".")[0] for name in imports(path, top_level=True)} & heavy


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "policy.py"], ids=name_of)
def test_policies_are_pure(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {
        "torch",
        "time",
        "os",
        "socket",
        "subprocess",
        "asyncio",
    }
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "open" for call in calls)
