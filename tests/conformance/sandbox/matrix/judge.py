"""What comes of one row: run, checkpoint in mid-work, kill everything, restore, fork twice, go on.

The verdict is the program's own check, held against what the sandbox told. Wrong and told by the restore is
bad; wrong and not told by anybody is what the matrix looks for. A checkpoint that refuses beforehand is as
good as one that keeps everything, provided that it says why, and that the sandbox goes on unharmed. Where a
check fails and nothing was told, the same work is done once more without a checkpoint: a row that fails then
too says nothing about checkpoints.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.agents.sandbox.harness import new_name
from conformance.sandbox.matrix.arena import Answer, Arena, Told
from conformance.sandbox.matrix.row import MatrixRow, Outcome, Verdict
from windtunnel.agents.sandbox.context import FAULTS
from windtunnel.agents.sandbox.errors import SandboxError

EVERY = 0.1
"""Seconds between two questions whether the work is in its middle."""
FORKS = 2
REFUSES = 77
"""Exit status of a setup that was refused."""


class WrongRow(Exception):
    """A command of a row did not end as it must, in words."""


class RefusedInside(WrongRow):
    """The sandbox refuses its programs what the row is about, in words."""


def judged(arena: Arena, row: MatrixRow, image: str, environment: Mapping[str, str]) -> Outcome:
    """The outcome of ``row`` in sandboxes of ``image``; never raises for what a sandbox does."""
    begin = time.monotonic()
    outcome = _outcome(arena, row, image, environment)
    if outcome.verdict is Verdict.SILENT:
        undisturbed = _control(arena, row, image, environment)
        if undisturbed:
            outcome = Outcome(row, Verdict.BROKEN, undisturbed)
    return replace(outcome, seconds=time.monotonic() - begin)


def _outcome(arena: Arena, row: MatrixRow, image: str, environment: Mapping[str, str]) -> Outcome:
    name = new_name("row")
    names = [name, *(f"{name}-fork-{number}" for number in range(1, FORKS + 1))]
    try:
        try:
            start(arena, row, name, image, environment)
        except RefusedInside as refusal:
            return Outcome(row, Verdict.REFUSED, str(refusal))
        except (WrongRow, SandboxError, *FAULTS) as error:
            return Outcome(row, Verdict.BROKEN, str(error))
        kept = arena.checkpoint(name)
        if kept.words or not kept.id:
            return _refused(arena, row, name, kept)
        arena.kill(name)
        reply = arena.restore(name)
        wrong = "" if reply.words else failed(arena, row, name, "after the restore")
        if not reply.words and not wrong:
            reply = arena.fork(kept.id, f"{name}-fork", FORKS)
            for number, fork in enumerate(names[1:], 1) if not reply.words else ():
                wrong = wrong or failed(arena, row, fork, f"in fork {number}")
        if not reply.words and not wrong:
            wrong = failed(arena, row, name, "going on")
    finally:
        for each in names:
            arena.remove(each)
    if reply.words:
        return Outcome(row, Verdict.TOLD, reply.words)
    return Outcome(row, Verdict.SILENT, wrong) if wrong else Outcome(row, Verdict.RIGHT)


def _refused(arena: Arena, row: MatrixRow, name: str, reply: Told) -> Outcome:
    """A checkpoint that said what it cannot keep: right only where that is named, and nothing was harmed."""
    harm = failed(arena, row, name, "after the refusal") or failed(arena, row, name, "going on")
    if harm:
        return Outcome(row, Verdict.TOLD, f"refused ({reply.words}), and harmed: {harm}")
    if reply.fault:
        return Outcome(row, Verdict.TOLD, reply.fault)
    if row.refused and not re.search(row.refused, reply.words):
        return Outcome(
            row, Verdict.TOLD, f"refused, but not in words that match {row.refused!r}: {reply.words}"
        )
    return Outcome(row, Verdict.REFUSED, reply.words)


def _control(arena: Arena, row: MatrixRow, image: str, environment: Mapping[str, str]) -> str:
    """What goes wrong with a row that nobody disturbs, in words; empty when nothing does."""
    name = new_name("control")
    try:
        start(arena, row, name, image, environment)
        ask(arena, row, name, row.check, "undisturbed")
        go_on(arena, row, name)
    except (WrongRow, SandboxError, *FAULTS) as error:
        return str(error)
    finally:
        arena.remove(name)
    return ""


def start(arena: Arena, row: MatrixRow, name: str, image: str, environment: Mapping[str, str]) -> None:
    """The row's work is in its middle on return. Raises WrongRow or SandboxError in words."""
    arena.create(name, image, row.network, environment)
    for file in row.files:
        arena.put(name, f"/row/{file}", (row.inside / file).read_bytes())
    ask(arena, row, name, "mkdir -p /row && cd /row", "at the start")
    if row.setup:
        answer = arena.run(name, row.setup, row.seconds)
        if answer.status == REFUSES and row.refused and re.search(row.refused, answer.text):
            raise RefusedInside(_last(answer.text))
        _demand(answer, "in the setup")
    if row.start:
        ask(arena, row, name, f"{{\n{row.start}\n}} </dev/null >/row/out 2>&1 &", "at the start")
    deadline = time.monotonic() + row.seconds
    while (answer := arena.run(name, row.ready, row.seconds)).status != 0:
        if time.monotonic() > deadline:
            out = arena.run(name, "tail -n 3 /row/out 2>&1", row.seconds).text
            raise WrongRow(f"not ready after {row.seconds:g} s: {_last(answer.text)} {_last(out)}".rstrip())
        time.sleep(EVERY)


def go_on(arena: Arena, row: MatrixRow, name: str) -> None:
    """The rest of the work, and the check of its end. Raises WrongRow or SandboxError in words."""
    if row.go_on:
        ask(arena, row, name, row.go_on, "going on")
    ask(arena, row, name, row.end or row.check, "at the end")


def ask(arena: Arena, row: MatrixRow, name: str, command: str, when: str) -> None:
    _demand(arena.run(name, command, row.seconds), when)


def _demand(answer: Answer, when: str) -> None:
    if answer.status != 0:
        raise WrongRow(f"{when}: exit status {answer.status}: {_last(answer.text)}")


def failed(arena: Arena, row: MatrixRow, name: str, when: str) -> str:
    """With which words the check (or "going on": the rest of the work) fails; empty when it does not."""
    try:
        if when == "going on":
            go_on(arena, row, name)
        else:
            ask(arena, row, name, row.check, when)
    except (WrongRow, SandboxError, *FAULTS) as error:
        return str(error)
    return ""


def _last(text: str) -> str:
    """The end of what was printed, on one line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-300:]
