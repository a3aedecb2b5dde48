"""Decisions made anew, with the capability that docs/adding-a-capability.md adds."""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from windtunnel import capabilities, network
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.capabilities import Capability
from windtunnel.cli.main import app
from windtunnel.replay import locate, replay, short
from windtunnel.store.eventlog import EventLog
from windtunnel.store.runs import Store

PAGE = Path(__file__).parent.parent / "docs" / "adding-a-capability.md"
BLOCK = re.compile(r'```python title="src/(windtunnel/[\w/]+\.py)"\n(.*?)```', re.DOTALL)


@pytest.fixture
def hedge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's capability, installed; yields the folder of its source."""
    root = tmp_path / "source" / "windtunnel"
    for name, text in BLOCK.findall(PAGE.read_text()):
        if name.endswith("/capabilities.py"):
            exec(text, table := {"Capability": Capability})
            continue
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(network, "__path__", [*network.__path__, str(root / "network")])
    monkeypatch.setattr(capabilities, "CAPABILITIES", (*capabilities.CAPABILITIES, *table["CAPABILITIES"]))
    yield root / "network" / "hedge"
    for name in [name for name in sys.modules if name.startswith("windtunnel.network.hedge")]:
        del sys.modules[name]
    vars(network).pop("hedge", None)


@pytest.fixture
def recorded(hedge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of two requests, the first of which was slow once, on a clock that each look moves on."""
    from windtunnel.network.hedge import live

    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.append("begun")
    clock, copies, again = count(), count(), threading.Event()
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: next(clock) * 0.006))

    def answer() -> str:
        """Of the first copy when a second one is sent."""
        if next(copies):
            again.set()
        assert again.wait(60)
        return "answer"

    assert live.ask(answer, 0.02, log) == "answer"
    assert live.ask(lambda: "at once", 0.02, log) == "at once"
    log.close()
    return log.path


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["replay", *words])
    if isinstance(done.exception, UserError):
        return 2, str(done.exception)
    return done.exit_code, done.output


def test_the_example_is_small_and_its_twin_shows_the_effect(hedge: Path) -> None:
    import numpy as np
    from windtunnel.network.hedge.policy import never
    from windtunnel.network.hedge.twin import answer_times

    assert sum(len(text.splitlines()) for _, text in BLOCK.findall(PAGE.read_text())) <= 150
    hedged = answer_times(10_000, np.random.default_rng(1))
    alone = answer_times(10_000, np.random.default_rng(1), never)
    assert np.percentile(hedged, 99) < 0.1 < np.percentile(alone, 99)


def test_the_same_policy_decides_the_same(recorded: Path) -> None:
    (part,) = replay(recorded).parts
    assert part.capability == "network.hedge"
    assert part.policy == "hedge"
    assert part.decisions == part.same > 0
    assert part.replayed_cost == part.recorded_cost


def test_a_mutated_policy_is_found_out(recorded: Path, hedge: Path) -> None:
    import windtunnel.network.hedge.policy as policy

    source = (hedge / "policy.py").read_text()
    mutated = source.replace("seen.waited < seen.usual", "seen.waited < 2 * seen.usual")
    assert mutated != source
    namespace: dict[str, object] = {"__name__": policy.__name__}
    exec(compile(mutated, "mutated", "exec"), namespace)
    policy.POLICIES = {"hedge": lambda observation: policy.Decision(namespace["decide"](observation).send)}
    (part,) = replay(recorded).parts
    assert [difference.fields for difference in part.differences] == [("send", "reason")]


def test_another_policy_differs_where_it_must_and_is_priced(recorded: Path) -> None:
    status, text = invoke(str(recorded.parent), "--policy", "never", "--json")
    assert status == 0
    (part,) = json.loads(text)["capabilities"]
    (difference,) = part["differences"]
    assert difference["recorded"]["send"] is True
    assert difference["replayed"] == {"is": "Decision", "send": False, "reason": "one request only"}
    assert difference["observation"]["waited"] >= difference["observation"]["usual"]
    assert (part["recorded_cost"]["requests"], part["replayed_cost"]["requests"]) == (1, 0)
    assert part["same"] == part["decisions"] - 1
    status, text = invoke(str(recorded), "--policy", "never")
    assert "made anew by never" in text
    assert "requests: 1 recorded, 0 anew (emulated)" in text


def test_a_policy_in_a_file(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from windtunnel.network.hedge.policy import Decision\n"
        "def decide(observation):\n    return Decision(observation.sent < 2)\n"
    )
    (part,) = replay(recorded, str(file)).parts
    assert part.policy == str(file)
    assert part.differences
    file.write_text("def decide(observation):\n    return True\n")
    with pytest.raises(
        UserError, match=r"decision 1 \(network\.hedge\): the policy answered True, accepted is"
    ):
        replay(recorded, str(file))
    file.write_text("def decide(observation):\n    return 1 / 0\n")
    with pytest.raises(ScriptError, match=r"mine\.py: decide failed: division by zero"):
        replay(recorded, str(file))
    file.write_text("CAPABILITY = 'training.elastic'\ndef decide(observation): ...\n")
    with pytest.raises(UserError, match=r"CAPABILITY 'training\.elastic' has no decisions in this log"):
        replay(recorded, str(file))


def test_runs_are_found_by_id_folder_and_name(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WINDTUNNEL_SANDBOX_HOME", str(tmp_path / "sandboxes"))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    run = Store.open().begin("network.hedge", {})
    (run.directory / "events.jsonl").write_bytes(recorded.read_bytes())
    box = tmp_path / "sandboxes" / "boxes" / "demo"
    box.mkdir(parents=True)
    (box / "events.jsonl").write_bytes(recorded.read_bytes())
    own = run.directory / "events.jsonl"
    assert locate("last") == locate(run.id) == locate(str(run.directory)) == locate(str(own)) == own
    assert locate("sandbox:demo") == box / "events.jsonl"


def test_bad_input_is_one_sentence(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WINDTUNNEL_SANDBOX_HOME", str(tmp_path / "sandboxes"))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    whole = recorded.read_text()
    empty, odd, strange = (tmp_path / name for name in ("empty.jsonl", "odd.jsonl", "strange.jsonl"))
    empty.write_text("")
    odd.write_text(whole.replace('"waited"', '"waitedd"'))
    strange.write_text(whole.replace("network.hedge", "network.other"))
    (tmp_path / "folder").mkdir()
    for words, sentence in {
        ("last",): "the store is empty",
        ("20990101",): "'20990101' is not a run",
        ("sandbox:demo",): "there is no sandbox 'demo'",
        (str(tmp_path / "folder"),): "has recorded no decisions",
        (str(empty),): "has no decisions",
        (str(odd),): r"decision 1 (network.hedge) is not one that this version reads",
        (str(strange),): "capability 'network.other' is unknown",
        (
            str(recorded),
            "--policy",
            "other",
        ): "'other' is unknown; accepted are a file ending in .py or one of: network.hedge: hedge, never",
        (str(recorded), "--policy", "none.py"): "there is no file none.py",
    }.items():
        status, text = invoke(*words)
        assert (status, "\n" in text) == (2, False)
        assert sentence in text


def test_values_are_shown_in_short() -> None:
    value = {"is": "Seen", "a": 1.23456789, "b": [1, 2, 3, 4, 5], "c": None, "d": {"e": "x"}}
    assert short(value) == "Seen(a=1.235, b=[1, 2, 3, 4, …], d=(e=x))"
    assert short(value, 10) == "Seen(a=1.…"


def test_the_example_is_valid_python() -> None:
    for name, text in BLOCK.findall(PAGE.read_text()):
        if not name.endswith("/capabilities.py"):
            ast.parse(text)
