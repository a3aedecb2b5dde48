"""Recordings of other projects as traces: SWE-agent, mini-SWE-agent (both in ``trajectories``), asciicast.

What a recording says is kept; what had to be guessed or left out is told in ``Converted.notes``. Expected
outputs are *not* taken over: they are those of another machine. ``replay.recorded`` fills in those of a
fault-free run here.

An asciicast (version 2 or 3) records a terminal, as lines ``[seconds, kind, text]``. It does not say what a
command is; it is guessed:

- Where keys were recorded (kind ``i``): what was typed up to Enter, with backspace and Ctrl-U applied. A line
  typed with arrows or Tab cannot be known and is left out. A line typed while no prompt was seen is input of
  a running program, and is left out too.
- Otherwise from the screen: a line that starts with something like a prompt (up to ``$``, ``#``, ``%`` or
  ``❯`` and a blank) is a command; lines after a ``> `` prompt continue it.

Every turn is tagged ``guess``. Think time: from the moment the prompt was back to the moment the next
command was entered, so it holds the typing too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.traces.generate import Think
from windtunnel.agents.sandbox.traces.schema import FIXED_ENVIRONMENT, Trace, TraceTurn
from windtunnel.agents.sandbox.traces.trajectories import Converted, from_mini, from_sweagent, name_from
from windtunnel.base.errors import UserError
from windtunnel.traces.header import SURROGATE

MOST_BYTES = 256 * 2**20


def convert(
    path: Path,
    *,
    name: str = "",
    source: str = "",
    licence: str = "unknown",
    workdir: str = "/workspace",
    seed: int = 0,
    think: Think | None = None,
) -> Converted:
    """The trace that a recording holds. ``think`` and ``seed``: for recordings without times."""
    text = _read(path)
    think = think or Think()
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as fault:
        data = None
        first = text.split("\n", 1)[0]
        if '"version"' not in first:
            raise UserError(
                f"{path}: not JSON ({fault}); accepted are a SWE-agent .traj, a mini-SWE-agent "
                "trajectory, and an asciicast of version 2 or 3"
            ) from fault
    except RecursionError as fault:
        raise UserError(f"{path}: the JSON is nested too deeply to be a recording") from fault
    if data is None or (isinstance(data, dict) and "version" in data and "width" in data):
        found = from_cast(path, text, workdir)
    elif isinstance(data, dict) and ("trajectory" in data or "history" in data):
        found = from_sweagent(path, data, workdir, seed, think)
    elif isinstance(data, list) or (isinstance(data, dict) and "messages" in data):
        found = from_mini(path, data, workdir, seed, think)
    else:
        raise UserError(
            f"{path}: no recording that is known; a SWE-agent file has the field trajectory or history, a "
            "mini-SWE-agent file is a list of messages or has the field messages"
        )
    if not found.trace.turns:
        raise UserError(f"{path}: the recording holds no command that could be taken over")
    # JSON can hold halves of characters, and bytes that are no UTF-8 are read as such; no shell text can
    trace = replace(
        found.trace,
        prelude=SURROGATE.sub("\ufffd", found.trace.prelude),
        turns=tuple(
            replace(turn, command=SURROGATE.sub("\ufffd", turn.command)) for turn in found.trace.turns
        ),
    )
    named = replace(trace, name=name or trace.name, source=source or trace.source, licence=licence)
    return replace(found, trace=named)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise UserError(f"{path}: the recording cannot be read: {fault.strerror}") from fault
    if len(data) > MOST_BYTES:
        raise UserError(f"{path}: the recording is larger than {MOST_BYTES >> 20} MiB")
    return data.decode("utf-8", "surrogateescape")


ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_=>]|[()][0-9A-B])")
PROMPT = re.compile(r"^(?:\([\w.-]+\) )?[^\n$#%❯]{0,120}[$#%❯] ")
BARE_PROMPT = re.compile(PROMPT.pattern + r"?$")
CONTINUED = re.compile(r"^> ")


@dataclass
class _Guess:
    command: str
    ready: float
    """When the prompt that it was typed at was there."""
    entered: float


def from_cast(path: Path, text: str, workdir: str) -> Converted:
    events = _events(path, text)
    typed = any(kind == "i" for _, kind, _ in events)
    guesses, notes = _from_keys(events) if typed else _from_screen(events)
    turns = []
    for number, (guess, after) in enumerate(zip(guesses, [*guesses[1:], None], strict=True), 1):
        think = 0.0 if after is None else round(max(0.0, after.entered - after.ready), 3)
        turns.append(TraceTurn(number, guess.command, think=think, tags=("guess",)))
    how = "the keys that were recorded" if typed else "what the screen showed after a prompt"
    trace = Trace(
        name=name_from(path),
        source=f"asciicast {path.name}",
        licence="",
        turns=tuple(turns),
        think="recorded: from the prompt to the next command's Enter (holds the typing)",
        needs=("bash",),
        environment=FIXED_ENVIRONMENT,
        workdir=workdir,
    )
    return Converted(trace, (f"commands are guessed from {how}", *notes))


def _events(path: Path, text: str) -> list[tuple[float, str, str]]:
    """Events with seconds since the start, whatever the version."""
    lines = text.split("\n")
    header = _json(path, 1, lines[0])
    version = header.get("version") if isinstance(header, dict) else None
    if version not in (2, 3):
        raise UserError(f"{path}, line 1: field version: {version!r} is not accepted; use 2 or 3")
    events = []
    now = 0.0
    for number, line in enumerate(lines[1:], 2):
        if not line.strip() or (version == 3 and line.startswith("#")):
            continue
        event = _json(path, number, line)
        if not (
            isinstance(event, list)
            and len(event) == 3
            and type(event[0]) in (int, float)
            and 0 <= event[0] < 1e9
            and isinstance(event[1], str)
            and isinstance(event[2], str)
        ):
            raise UserError(f"{path}, line {number}: not an event; use [seconds, kind, text]")
        now = now + event[0] if version == 3 else float(event[0])
        events.append((now, event[1], event[2]))
    return events


def _json(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as fault:
        raise UserError(f"{path}, line {number}: not JSON: {fault}") from fault


def _plain(text: str) -> str:
    """What is left of a piece of output without escapes; a lone carriage return starts the line again."""
    text = ESCAPE.sub("", text).replace("\r\n", "\n")
    return re.sub(r"[^\n]*\r", "", text)


def _from_keys(events: list[tuple[float, str, str]]) -> tuple[list[_Guess], list[str]]:
    guesses: list[_Guess] = []
    notes: list[str] = []
    line, known = "", True
    screen = ""
    ready: float | None = None  # when the prompt was last seen; None while a command runs
    prompts = False
    for now, kind, text in events:
        if kind == "o":
            screen = (screen + text)[-4096:]
            tail = _plain(screen).rsplit("\n", 1)[-1]
            if BARE_PROMPT.match(tail) or CONTINUED.fullmatch(tail):
                ready = now if ready is None else ready
                prompts = True
            continue
        if kind != "i":
            continue
        if ESCAPE.search(text) or "\x1b" in text or "\t" in text:
            known = False
            text = ESCAPE.sub("", text)
        for key in text:
            if key in "\r\n":
                _entered(line, known, ready if prompts else now, now, screen, guesses, notes)
                line, known, screen, ready = "", True, "", None
            elif key in "\x7f\b":
                line = line[:-1]
            elif key in "\x03\x15":
                line, known = "", True
            elif key >= " ":
                line += key
    return guesses, notes


def _entered(
    line: str,
    known: bool,
    ready: float | None,
    now: float,
    screen: str,
    guesses: list[_Guess],
    notes: list[str],
) -> None:
    """Enter was pressed: a command, a line more of one, input of a program, or something unknown."""
    if not known:
        notes.append(f"at {now:.1f} s a line was typed with arrows or Tab; it is left out")
    elif not line.strip():
        return
    elif ready is None:
        notes.append(f"at {now:.1f} s a line was typed into a running program; it is left out")
    elif guesses and CONTINUED.match(_plain(screen).rsplit("\n", 1)[-1]):
        guesses[-1].command += "\n" + line
    else:
        guesses.append(_Guess(line, ready, now))


def _from_screen(events: list[tuple[float, str, str]]) -> tuple[list[_Guess], list[str]]:
    guesses: list[_Guess] = []
    partial = ""
    ready: float | None = None
    fresh = False  # the line before was a command or a line more of one
    for now, kind, text in events:
        if kind != "o":
            continue
        partial += text
        *lines, partial = partial.split("\n")
        for raw in lines:
            shown = _plain(raw.rstrip("\r"))
            prompt = PROMPT.match(shown)
            if prompt and shown[prompt.end() :].strip():
                guesses.append(_Guess(shown[prompt.end() :].strip(), now if ready is None else ready, now))
                fresh = True
            elif fresh and guesses and CONTINUED.match(shown):
                guesses[-1].command += "\n" + shown[2:]
            else:
                fresh = False
            ready = None
        if ready is None and BARE_PROMPT.match(_plain(partial)):
            ready = now
    return guesses, ["output that looks like a prompt may have been taken for a command"]
