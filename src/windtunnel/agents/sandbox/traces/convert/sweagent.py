"""SWE-agent trajectories (.traj). Its file tools become shell functions (``tools.sh``), defined first.

Translated: open, goto, scroll_up, scroll_down, set_cursors, create, edit (by lines, by cursors, by text),
insert, find_file, search_dir, search_file, submit. The functions keep the open file and its line in
variables of the shell, as the agent's own first versions do. An edit that its linter refused is translated
into a view, because it changed nothing. All other tools of that agent (decompilers, connections, browsers,
str_replace_editor, …) are not translated; such turns are left out and named in the notes.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.traces.convert.parts import Converted, StandIn, name_from, with_drawn_think
from windtunnel.agents.sandbox.traces.generate import Think
from windtunnel.agents.sandbox.traces.schema import FIXED_ENVIRONMENT, Trace, TraceTurn
from windtunnel.base.errors import UserError

NOT_TRANSLATED = re.compile(
    "str_replace_editor|filemap|view_image|decompile|disassemble|connect_.+|debug_.+|open_site|close_site|"
    "(double_)?click_mouse|type_text|press_keys_on_page|screenshot_site|navigate_.+|reload_page|"
    "scroll_on_page|move_mouse|drag_mouse|wait_time|execute_script_on_page|get_console_output|"
    "set_browser_window_size|exit_.+|skip|think"
)
TRANSLATED = re.compile(
    "open|goto|scroll_up|scroll_down|set_cursors|create|edit|insert|find_file|search_dir|search_file|submit"
)
WINDOW = re.compile(r"\[File: (.+?) \((\d+) lines total\)\]\n(.*)", re.DOTALL)
NUMBERED = re.compile(r"^(\d+):(.*)$", re.MULTILINE)
REFUSED = re.compile(r"introduced new syntax error|edit was NOT applied|No edit was made|Text not found")
BY_LINES = re.compile(r"edit[ \t]*(\d+:\d+)?[ \t]*\n(.*?)\n?end_of_edit\s*", re.DOTALL)


def from_sweagent(path: Path, data: dict[str, Any], workdir: str, seed: int, think: Think) -> Converted:
    name = "trajectory" if "trajectory" in data else "history"
    steps = data[name]
    if not isinstance(steps, list):
        raise UserError(f"{path}: field {name}: {type(steps).__name__} is not accepted; use a list")
    if name == "history":
        steps = _steps(steps)
    notes: list[str] = []
    commands: list[tuple[str, tuple[str, ...]]] = []
    standin = StandIn()
    root = ""
    opened = ""
    for number, step in enumerate(steps, 1):
        if not isinstance(step, dict) or not isinstance(step.get("action"), str | None):
            raise UserError(f"{path}: step {number}: an object with the text field action is needed")
        action = (step.get("action") or "").strip("\n")
        observation = str(step.get("observation") or "").replace("\r\n", "\n")
        state = _state(step.get("state"))
        root = root or str(state.get("working_dir", "") or "")
        word = action.split(maxsplit=1)[0] if action.strip() else ""
        if not word or "\0" in action:
            notes.append(f"step {number} asks for nothing and is left out")
            continue
        if NOT_TRANSLATED.fullmatch(word):
            notes.append(f"step {number}: the tool {word} is not translated; the step is left out")
            continue
        opened = _learn(standin, word, action, observation, root, opened)
        commands.append(
            (_translated(word, action, observation), (word,) if TRANSLATED.fullmatch(word) else ())
        )
    tools = Path(__file__).with_name("tools.sh").read_text()
    turns = [TraceTurn(number, text, tags=tags) for number, (text, tags) in enumerate(commands, 1)]
    notes.append(f"the recording holds no times of replies; think times are {think.words}")
    if len(standin):
        notes.append(
            f"{len(standin)} files of the absent repository are stand-ins, from the recorded outputs"
        )
    trace = Trace(
        name=name_from(path),
        source=f"SWE-agent trajectory {path.name}",
        licence="",
        turns=with_drawn_think(turns, seed, think),
        think=think.words,
        needs=("bash", "git", "awk", "sed", "find", "grep"),
        environment=FIXED_ENVIRONMENT,
        workdir=root if len(root) > 1 and root.startswith("/") else workdir,
        prelude=f"{standin.prelude()}\n{tools}",
    )
    return Converted(trace.moved(workdir), tuple(notes))


def _steps(history: list[Any]) -> list[dict[str, Any]]:
    """The steps of a file that holds only the conversation: an action, then the message that answers it."""
    return [
        {"action": asked["action"], "observation": answer.get("content")}
        for asked, answer in itertools.pairwise(history)
        if isinstance(asked, dict) and isinstance(answer, dict) and asked.get("action")
    ]


def _state(value: object) -> dict[str, Any]:
    """The recorded state: an object, or one as text (older files)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
    return value if isinstance(value, dict) else {}


def _edit(action: str, observation: str) -> str:
    if REFUSED.search(observation):
        return "_window  # this edit was refused when it was recorded"
    by_lines = BY_LINES.fullmatch(action + "\n")
    if by_lines:
        return _from_text("edit_lines" + (f" {by_lines[1]}" if by_lines[1] else ""), by_lines[2])
    return "edit_text" + action.removeprefix("edit")


def _from_text(call: str, text: str) -> str:
    end = "end_of_edit"
    while end in text:
        end += "_"
    return f"{call} <<'{end}'\n{text}\n{end}" if text else f"{call} </dev/null"


def _translated(word: str, action: str, observation: str) -> str:
    if word == "edit":
        return _edit(action, observation)
    if word == "insert":
        return "insert_text" + action.removeprefix("insert")
    if word == "submit":
        return "submit"  # what follows it is the answer, not a file
    return action


def _learn(standin: StandIn, word: str, action: str, observation: str, root: str, opened: str) -> str:
    """Note what the answer shows, and which file this step changed; returns the file that is now open."""
    window = WINDOW.search(observation)
    name = window[1] if window else opened
    inside = name.removeprefix(root.rstrip("/") + "/") if root else name
    if word in ("create", "edit", "insert"):
        standin.changed(inside)
    elif window and word in ("open", "goto", "scroll_up", "scroll_down"):
        lines = ((int(number), line) for number, line in NUMBERED.findall(window[3]))
        standin.saw(inside, lines, int(window[2]))
    elif word in ("rm", "mv", "cp", "sed", "echo", "cat"):
        try:
            for part in shlex.split(action)[1:]:
                standin.changed(part)
        except ValueError:
            pass  # an unclosed quotation mark: the shell will say so
    return name
