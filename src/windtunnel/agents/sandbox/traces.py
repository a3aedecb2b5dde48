"""An agent's session as a file of `windtunnel.traces.header`: its header, then one line for each turn.

Header, beyond what all traces have: ``name``; optional: ``environment`` (exported first, so that dates,
locale and identities are fixed), ``workdir``, ``prelude`` (shell text that builds what the session works on;
no turn, not counted), ``probes`` (name to shell text that tells a live service's state without changing it).

Turn: ``turn`` (1, 2, …), ``command`` (shell text); optional: ``think`` (seconds that the model thinks *after*
this turn), ``shell`` (persistent shell that it runs in), ``expect_exit`` and ``expect_stdout`` (exact text),
``tags``, ``true_class`` (the weakest class that loses nothing of the turn, when known), ``timeout``
(seconds).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.base.errors import UserError
from windtunnel.traces.header import SURROGATE, Fields, read

KIND = "agent-session"
VERSION = 1
CLASSES = tuple(turn_class.word for turn_class in TurnClass)
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class TraceTurn:
    """One command of the agent. See the module for the fields."""

    turn: int
    command: str
    think: float = 0.0
    shell: str = "main"
    expect_exit: int | None = None
    expect_stdout: str | None = None
    tags: tuple[str, ...] = ()
    true_class: TurnClass | None = None
    timeout: float = 60.0


@dataclass(frozen=True)
class Trace:
    """A session. See the module for the fields."""

    name: str
    turns: tuple[TraceTurn, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"
    prelude: str = ""
    probes: Mapping[str, str] = field(default_factory=dict)

    def opening(self) -> str:
        """Shell text to run before the first turn: environment, working directory, prelude."""
        lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        place = shlex.quote(self.workdir)
        lines.append(f"mkdir -p {place} && cd {place}")
        return "\n".join([*lines, self.prelude])


def load(path: Path) -> Trace:
    """Read a trace; UserError names the file, the line, the field, its value and what is accepted."""
    _, header, entries = read(path, KIND, VERSION)
    name = header.take("name", str)
    if not NAME.fullmatch(name):
        raise header.wrong("name", name, "up to 64 lower-case letters, digits, '.', '_' and '-'")
    workdir = header.take("workdir", str, "/workspace")
    if not workdir.startswith("/") or workdir == "/":
        raise header.wrong("workdir", workdir, "an absolute path other than /")
    environment = header.texts_by_name("environment")
    for variable in environment:
        if not VARIABLE.fullmatch(variable):
            raise header.wrong("environment", variable, "names of letters, digits and '_'")
    trace = Trace(
        name=name,
        turns=tuple(_turn(fields, number) for number, fields in enumerate(entries, 1)),
        environment=environment,
        workdir=workdir,
        prelude=header.take("prelude", str, ""),
        probes=header.texts_by_name("probes"),
    )
    header.done()
    if not trace.turns:
        raise UserError(f"{path}: the trace has no turns; after the header comes one line for each")
    return trace


def _turn(fields: Fields, expected: int) -> TraceTurn:
    number = fields.take("turn", int)
    if number != expected:
        raise fields.wrong("turn", number, f"{expected} (turns are numbered 1, 2, …)")
    word = fields.take("true_class", str, None)
    if word is not None and word not in CLASSES:
        raise fields.wrong("true_class", word, ", ".join(CLASSES))
    exit_code = fields.take("expect_exit", int, None)
    if exit_code is not None and not 0 <= exit_code <= 255:
        raise fields.wrong("expect_exit", exit_code, "0 to 255")
    turn = TraceTurn(
        turn=number,
        command=fields.take("command", str),
        think=fields.number("think", 0.0, least=0.0),
        shell=fields.take("shell", str, "main"),
        expect_exit=exit_code,
        expect_stdout=fields.take("expect_stdout", str, None),
        tags=fields.texts("tags", ()),
        true_class=None if word is None else TurnClass[word.upper()],
        timeout=fields.number("timeout", 60.0, least=0.001),
    )
    if "\0" in turn.command or SURROGATE.search(turn.command):
        raise fields.wrong("command", turn.command, "text without NUL and lone surrogates")
    fields.done()
    return turn
