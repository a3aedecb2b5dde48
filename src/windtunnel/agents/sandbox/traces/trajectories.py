"""What agents left of their sessions as traces: trajectories of SWE-agent and of mini-SWE-agent.

A recorded session works on a repository that is not there. Its outputs show parts of it: windows of files
with line numbers, and files printed whole. From these the prelude writes a *stand-in*: the lines that were
seen, at their places, and empty lines for all others. So reads and edits do something real, without network;
imports and tests of the absent rest fail, here as they would anywhere.

*mini-SWE-agent*: a list of messages (version 1) or ``{"messages": […]}`` (1.1 and later). Commands are the
tool calls in ``extra.actions``, or the one fenced block of an assistant's message. Every command of that
agent runs in a shell of its own, so each is wrapped into ``bash -c``: a ``cd`` must not last here either.
Newer files record when each message arrived; then think times are the recorded gaps between a command's
answer and the next reply.

*SWE-agent* (``.traj``): its file tools become shell functions (``tools/sweagent.sh``), defined first.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from windtunnel.agents.sandbox.traces.generate import Think
from windtunnel.agents.sandbox.traces.schema import FIXED_ENVIRONMENT, NAME, Trace, TraceTurn
from windtunnel.base.errors import UserError

MOST_LINES = 100_000
"""A recorded window that claims a longer file is not believed."""


@dataclass(frozen=True)
class Converted:
    """A trace, and in words what was guessed, drawn or left out on the way."""

    trace: Trace
    notes: tuple[str, ...]


def name_from(path: Path) -> str:
    """A trace's name from that of a file."""
    words = re.sub(r"[^a-z0-9._-]+", "-", path.name.lower().split(".")[0]).strip("-._")[:64]
    return words if NAME.fullmatch(words) else "recording"


def with_drawn_think(turns: Sequence[TraceTurn], seed: int, think: Think) -> tuple[TraceTurn, ...]:
    """The turns with think times from the log-normal; the last one has none."""
    random = Random(seed)
    drawn = [replace(turn, think=think.draw(random)) for turn in turns[:-1]]
    return (*drawn, *turns[-1:])


class StandIn:
    """Files as a recording shows them, before the session itself changed them."""

    def __init__(self) -> None:
        self._files: dict[str, dict[int, str]] = {}
        self._lengths: dict[str, int] = {}
        self._changed: set[str] = set()

    def saw(self, path: str, lines: Iterable[tuple[int, str]], length: int = 0) -> None:
        """Lines of a file were shown, numbered from 1. Views after the session's own changes do not count."""
        path = _relative(path)
        if not path or path in self._changed or length > MOST_LINES:
            return
        known = self._files.setdefault(path, {})
        for number, line in lines:
            if 0 < number <= MOST_LINES:
                known.setdefault(number, line)
        self._lengths[path] = max(length, self._lengths.get(path, 0), *known, 0)

    def changed(self, path: str) -> None:
        """From now on the session's own text is in the file."""
        self._changed.add(_relative(path))

    def prelude(self) -> str:
        """Shell text that writes the files and commits them; empty when nothing was seen."""
        parts = []
        for path, known in sorted(self._files.items()):
            text = "\n".join(known.get(number, "") for number in range(1, self._lengths[path] + 1))
            parts.append(_written(path, text))
        if parts:
            parts.append("git init -q -b main . && git add -A && git commit -q -m 'stand-in'")
        return "\n".join(parts)

    def notes(self) -> list[str]:
        """What there is to tell of it."""
        told = f"{len(self._files)} files of the absent repository are stand-ins, from the recorded outputs"
        return [told] if self._files else []


def _relative(path: str) -> str:
    """The path inside the working directory; empty for one that leads out of it."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        return ""
    return "" if str(pure) == "." else str(pure)


def _written(path: str, text: str) -> str:
    end = "END_OF_FILE"
    while end in text:
        end += "_"
    folder = PurePosixPath(path).parent
    make = "" if str(folder) == "." else f"mkdir -p {shlex.quote(str(folder))}\n"
    return f"{make}cat > {shlex.quote(path)} <<'{end}'\n{text}\n{end}"


BLOCK = re.compile(r"```(?:mswea_bash_command|bash|sh)[ \t]*\n(.*?)\n```", re.DOTALL)
ANSWER = re.compile(r"<returncode>(-?\d+)</returncode>\s*<output>\n?(.*?)\n?</output>", re.DOTALL)
PRINTED = re.compile(r"cat (?:\./)?([\w./+-]+)")
NUMBERED_BY_NL = re.compile(r"nl -ba (?:\./)?([\w./+-]+)(?: \| sed -n '\d+,\d+p')?")
PART = re.compile(r"sed -n '(\d+),\d+p' (?:\./)?([\w./+-]+)")
WRITES = re.compile(r">|\b(?:sed -i|tee|mv|cp|rm|patch|truncate)\b")
NAMED = re.compile(r"(?<![\w/.-])(?:\./)?([\w/+-][\w./+-]*)")


@dataclass
class _Call:
    command: str
    asked: float | None
    answered: float | None = None


def from_mini(path: Path, data: Any, workdir: str, seed: int, think: Think) -> Converted:
    messages = data if isinstance(data, list) else data["messages"]
    if not isinstance(messages, list):
        raise UserError(f"{path}: field messages: {type(messages).__name__} is not accepted; use a list")
    notes: list[str] = []
    calls: list[_Call] = []
    waiting: list[_Call] = []
    standin = StandIn()
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{path}: message {place}: an object with the field role is needed")
        extra = message.get("extra")
        extra = extra if isinstance(extra, dict) else {}
        when = extra.get("timestamp")
        moment = float(when) if isinstance(when, int | float) else None
        if message["role"] == "assistant":
            commands = _commands(message, extra)
            if not commands:
                notes.append(f"message {place} holds no single command and is left out")
            waiting = [_Call(command, moment) for command in commands]
            calls += waiting
        elif waiting and message["role"] in ("user", "tool"):
            call = waiting.pop(0)
            call.answered = moment
            _show(standin, call.command, _text(message))
    turns = [
        TraceTurn(number, f"bash -c {shlex.quote(call.command)}", tags=("fresh-shell",))
        for number, call in enumerate(calls, 1)
    ]
    notes.append("every command runs in a shell of its own, as that agent does it (bash -c)")
    notes += standin.notes()
    gaps = _gaps(calls)
    if gaps is None:
        notes.append(f"the recording holds no times; think times are {think.words}")
        timed, origin = with_drawn_think(turns, seed, think), think.words
    else:
        timed = tuple(
            TraceTurn(turn.turn, turn.command, think=gap, tags=turn.tags)
            for turn, gap in zip(turns, gaps, strict=True)
        )
        origin = "recorded: from a command's answer to the next reply"
    return Converted(
        Trace(
            name=name_from(path),
            source=f"mini-SWE-agent trajectory {path.name}",
            licence="",
            turns=timed,
            think=origin,
            needs=("bash", "git"),
            environment=FIXED_ENVIRONMENT,
            workdir=workdir,
            prelude=standin.prelude(),
        ),
        tuple(notes),
    )


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _commands(message: dict[str, Any], extra: dict[str, Any]) -> list[str]:
    actions = extra.get("actions")
    if isinstance(actions, list):
        found = [one.get("command") if isinstance(one, dict) else one for one in actions]
        return [command for command in found if isinstance(command, str) and "\0" not in command]
    blocks = BLOCK.findall(_text(message))
    return blocks if len(blocks) == 1 and "\0" not in blocks[0] else []


def _gaps(calls: list[_Call]) -> list[float] | None:
    """Seconds of thinking after each command; None when the recording does not say."""
    gaps = []
    for call, after in itertools.pairwise(calls):
        if call.asked is None or after.asked is None:
            return None
        if after.asked == call.asked:
            gaps.append(0.0)  # several commands of one reply
            continue
        since = call.answered if call.answered is not None else call.asked
        gaps.append(round(max(0.0, after.asked - since), 3))
    if len(gaps) > 0 and all(gap == 0 for gap in gaps):
        return None  # one moment for all: written by a test, not by a clock
    return [*gaps, 0.0] if calls and calls[0].asked is not None else None


def _show(standin: StandIn, command: str, text: str) -> None:
    """Tell the stand-in what the answer shows of a file, and which file the command wrote."""
    if WRITES.search(command):
        for named in NAMED.findall(command):
            standin.changed(named)
    answer = ANSWER.search(text)
    if not answer or answer[1] != "0":
        return
    lines = answer[2].split("\n")
    printed, part = PRINTED.fullmatch(command), PART.fullmatch(command)
    numbered = NUMBERED_BY_NL.fullmatch(command)
    if printed:
        standin.saw(printed[1], enumerate(lines, 1))
    elif part:
        standin.saw(part[2], enumerate(lines, int(part[1])))
    elif numbered:
        pairs = (line.split("\t", 1) for line in lines)
        standin.saw(
            numbered[1],
            ((int(pair[0]), pair[1]) for pair in pairs if len(pair) == 2 and pair[0].strip().isdigit()),
        )


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
    tools = (Path(__file__).parent / "tools" / "sweagent.sh").read_text()
    turns = [TraceTurn(number, text, tags=tags) for number, (text, tags) in enumerate(commands, 1)]
    notes.append(f"the recording holds no times of replies; think times are {think.words}")
    notes += standin.notes()
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
