"""Recordings of other projects: what is taken over, what is told to be missing, and that the result runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox.traces.convert import convert
from windtunnel.agents.sandbox.traces.replay import replay
from windtunnel.agents.sandbox.traces.schema import load, save
from windtunnel.base.errors import UserError

FIXTURES = Path(__file__).parent / "fixtures"


def needs_tools() -> None:
    for program in ("git", "python3", "awk"):
        if not shutil.which(program, path="/usr/bin:/bin"):
            pytest.skip(f"needs {program}")


def test_sweagent_session_does_the_same_here(new_box: Callable[[], Any]) -> None:
    needs_tools()
    found = convert(FIXTURES / "garden.traj", licence="Apache-2.0")
    assert found.trace.workdir == "/workspace"
    assert "/garden/" not in found.trace.prelude + "".join(turn.command for turn in found.trace.turns)
    assert any("step 7: the tool decompile is not translated" in note for note in found.notes)
    assert any("step 12 asks for nothing" in note for note in found.notes)
    assert any("1 files of the absent repository are stand-ins" in note for note in found.notes)
    box = new_box()
    outputs = replay(found.trace.moved(str(box.workdir)), box)
    texts = [output.stdout.decode() for output in outputs]
    assert [output.exit_code for output in outputs] == [0] * 12
    assert texts[0] == "src/\n"
    assert texts[3] == "5\n"  # as it was recorded: the stand-in holds the lines that were seen
    assert "(12 lines total)" in texts[4]
    assert texts[5].count("width + self.length") == 1  # the refused edit changed nothing
    assert texts[9] == "6\n"
    assert "+        return self.width * self.length" in texts[-1]
    assert '+"""Beds of a garden."""' in texts[-1] and "+# the end" in texts[-1]


def test_sweagent_conversation_alone(tmp_path: Path) -> None:
    steps = json.loads((FIXTURES / "garden.traj").read_text())["trajectory"]
    history = [{"role": "system", "content": "You are an agent."}]
    for step in steps:
        history.append({"role": "assistant", "action": step["action"]})
        history.append({"role": "tool", "content": step["observation"]})
    path = tmp_path / "talk.traj"
    path.write_text(json.dumps({"history": history}))
    found = convert(path, workdir="/garden").trace
    whole = convert(FIXTURES / "garden.traj", workdir="/garden").trace
    assert found.turns == whole.turns


def test_mini_session_runs_every_command_in_a_shell_of_its_own(new_box: Callable[[], Any]) -> None:
    needs_tools()
    found = convert(FIXTURES / "words.traj.json")
    assert [turn.think for turn in found.trace.turns] == [0.0, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 0.0]
    assert found.trace.think.startswith("recorded")
    box = new_box()
    outputs = replay(found.trace.moved(str(box.workdir)), box)
    assert [output.exit_code for output in outputs] == [1, 0, 0, 1, 0, 0, 0, 0]
    texts = [output.stdout.decode() for output in outputs]
    assert texts[2].startswith("def count(text)\n")
    assert texts[5] == "workspace\n"  # the cd of the turn before did not last
    assert texts[6].startswith("def count(text):\n")


def test_first_mini_format_has_no_times() -> None:
    found = convert(FIXTURES / "words_first.traj.json", seed=4)
    assert len(found.trace.turns) == 7
    assert any("holds no single command" in note for note in found.notes)
    assert any("holds no times" in note for note in found.notes)
    assert found.trace == convert(FIXTURES / "words_first.traj.json", seed=4).trace
    assert found.trace != convert(FIXTURES / "words_first.traj.json", seed=5).trace


def test_cast_with_keys() -> None:
    found = convert(FIXTURES / "keys.cast")
    assert [turn.command for turn in found.trace.turns] == [
        "ls",
        "export MODE=fast",
        "python3",
        "echo $MODE",
    ]
    assert all("guess" in turn.tags for turn in found.trace.turns)
    # the prompt was back at 1.6 s, Enter came at 5.6 s
    assert found.trace.turns[0].think == pytest.approx(4.0)
    told = " ".join(found.notes)
    assert told.count("typed into a running program") == 2
    assert told.count("arrows or Tab") == 1


def test_cast_of_a_screen() -> None:
    found = convert(FIXTURES / "screen.cast")
    commands = [turn.command for turn in found.trace.turns]
    assert commands == ["ls", "cat > a.txt <<E\none line\nE", "cat a.txt"]
    assert found.trace.turns[0].think == pytest.approx(4.0)


@pytest.mark.parametrize("path", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_a_converted_trace_survives_its_file(path: Path, tmp_path: Path) -> None:
    trace = convert(path, name="given", source="here", licence="Apache-2.0").trace
    assert (trace.name, trace.source) == ("given", "here")
    save(trace, tmp_path / "one.jsonl")
    assert load(tmp_path / "one.jsonl") == trace


def test_originals_where_the_user_has_them(tmp_path: Path) -> None:
    """Set WINDTUNNEL_TRAJECTORIES to a folder of recordings to convert them all."""
    folder = os.environ.get("WINDTUNNEL_TRAJECTORIES")
    if not folder:
        pytest.skip("WINDTUNNEL_TRAJECTORIES names no folder of recordings")
    for path in sorted(Path(folder).iterdir()):
        trace = convert(path).trace
        save(trace, tmp_path / "one.jsonl")
        assert load(tmp_path / "one.jsonl") == trace


BROKEN = {
    "nothing.traj": ("", "not JSON"),
    "list.traj": ("[]", "no command"),
    "number.traj": ("3", "no recording that is known"),
    "other.traj": ('{"info": {}}', "no recording that is known"),
    "history.traj": ('{"history": [1, {"action": "ls"}]}', "no command"),
    "steps.traj": ('{"trajectory": {}}', "field trajectory: dict"),
    "step.traj": ('{"trajectory": [3]}', "step 1"),
    "action.traj": ('{"trajectory": [{"action": 3}]}', "step 1"),
    "messages.json": ('{"messages": 3}', "field messages: int"),
    "message.json": ('[{"content": "x"}]', "message 0"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
    "old.cast": ('{"version": 1, "width": 80, "stdout": []}', "version: 1 is not accepted"),
    "event.cast": ('{"version": 2, "width": 80}\n[1, "o"]', "line 2: not an event"),
    "time.cast": ('{"version": 2, "width": 80}\n[NaN, "o", ""]', "line 2: not an event"),
    "cut.cast": ('{"version": 2, "width": 80}\n[1, "o", "', "line 2: not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_recordings_are_sentences(name: str, tmp_path: Path) -> None:
    text, said = BROKEN[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        convert(path)
    assert str(path) in str(caught.value)


def test_absent_recording_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        convert(tmp_path / "absent.traj")


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../b", ".", ""])
def test_a_recording_cannot_write_outside_the_working_directory(path: str, tmp_path: Path) -> None:
    window = f"[File: {path} (1 lines total)]\n1:owned"
    step = {"action": "open x", "observation": window, "state": {"working_dir": "/garden"}}
    recording = tmp_path / "one.traj"
    recording.write_text(json.dumps({"trajectory": [step]}))
    assert "owned" not in convert(recording).trace.prelude


def test_a_window_cannot_claim_a_giant_file(tmp_path: Path) -> None:
    window = "[File: a.txt (999999999 lines total)]\n1:x\n999999999:y"
    step = {"action": "open a.txt", "observation": window, "state": {}}
    recording = tmp_path / "one.traj"
    recording.write_text(json.dumps({"trajectory": [step]}))
    assert len(convert(recording).trace.prelude) < 10_000
