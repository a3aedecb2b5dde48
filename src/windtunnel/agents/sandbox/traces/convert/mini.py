"""mini-SWE-agent trajectories: a list of messages (version 1) or ``{"messages": […]}`` (1.1 and later).

Commands are the tool calls in ``extra.actions``, or the one fenced block of an assistant's message. Every
command of that agent runs in a shell of its own, so each is wrapped into ``bash -c``: a ``cd`` must not last
here either. Newer files record when each message arrived; then think times are the recorded gaps between a
command's answer and the next reply.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.traces.convert.parts import Converted, StandIn, name_from, with_drawn_think
from windtunnel.agents.sandbox.traces.generate import Think
from windtunnel.agents.sandbox.traces.schema import FIXED_ENVIRONMENT, Trace, TraceTurn
from windtunnel.base.errors import UserError

BLOCK = re.compile(r"```(?:mswea_bash_command|bash|sh)[ \t]*\n(.*?)\n```", re.DOTALL)
ANSWER = re.compile(r"<returncode>(-?\d+)</returncode>\s*<output>\n?(.*?)\n?</output>", re.DOTALL)
PRINTED = re.compile(r"cat (?:\./)?([\w./+-]+)")
NUMBERED = re.compile(r"nl -ba (?:\./)?([\w./+-]+)(?: \| sed -n '\d+,\d+p')?")
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
    if len(standin):
        notes.append(
            f"{len(standin)} files of the absent repository are stand-ins, from the recorded outputs"
        )
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
    printed, part, numbered = PRINTED.fullmatch(command), PART.fullmatch(command), NUMBERED.fullmatch(command)
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
