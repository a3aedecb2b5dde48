"""What the tests of agents and launchers share: scripts without torch, and waiting on conditions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.waiting import until
from windtunnel.training import cleanup
from windtunnel.training.launch import Launched, launch

T = TypeVar("T")

# A trainer without torch: it beats, and writes down each membership that it is told.
SPEAKER = """
import json, os, sys, threading, time
from windtunnel.training.elastic.live.link import AgentLink
link = AgentLink(os.environ["WINDTUNNEL_AGENT"], lambda reason: os._exit(1))
generation = link.membership.generation
print(json.dumps(link.membership.plain()), flush=True)
"""
# It stays, and tells its generation, until the file "stop" is in the run's folder; then it ends well.
STAYS = (
    SPEAKER
    + """
def here():
    link.event("here", generation, pid=os.getpid())
here()
while not os.path.exists(os.path.join(os.environ["WINDTUNNEL_RUN"], "stop")):
    if link.newer(generation, 0.02):
        generation = link.newest()[0].generation
        print(json.dumps(link.membership.plain()), flush=True)
        here()
link.call("done", generation)
os._exit(0)
"""
)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def here(launched: Launched, generation: int, count: int) -> list[dict[str, Any]]:
    """``count`` ranks said that they are in ``generation``."""

    def said() -> list[dict[str, Any]] | None:
        matching = [event for event in kinds(launched.events(), "here") if event["generation"] == generation]
        return matching if len(matching) >= count else None

    return until(said)


def generation(launched: Launched) -> int:
    return max((event["generation"] for event in kinds(launched.events(), "decided")), default=0)


def finish(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "run" / "stop").touch()
    outcome = launched.wait(60)
    assert outcome is not None
    assert outcome.status == 0, outcome


def knowing(launched: Launched) -> dict[str, str]:
    return {**environment(), "WINDTUNNEL_SECRET": (launched.folder / "secret").read_text()}


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Any]:
    begun: list[Launched] = []

    def begin(text: str = STAYS, *arguments: str, **options: Any) -> Launched:
        settings: dict[str, Any] = {"hosts": 2, "preload": (), "folder": tmp_path / "run", "lease": 5.0}
        with (tmp_path / "output").open("wb") as output:
            settings["output"] = output.fileno()
            launched = launch(script(tmp_path, text), arguments, **{**settings, **options})
        begun.append(launched)
        return launched

    yield begin
    for launched in begun:
        launched.close()
        assert cleanup.marked(launched.token) == []
        assert not launched.memory.exists()
