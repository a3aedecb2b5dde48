"""Play a trace on anything that runs commands in persistent shells.

What a run shows of a turn is its standard output and how it ended. Standard error is not compared: shells
write notices of ended jobs into it whenever they happen to notice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn


class Runs(Protocol):
    """What a sandbox needs so that a trace can be played on it."""

    def run(self, command: str, *, shell: str = "main", timeout: float | None = None) -> TurnResult: ...


class TraceRejected(Exception):
    """A trace that does not run here, or not twice the same. One sentence."""


@dataclass(frozen=True)
class Output:
    """What one turn showed."""

    turn: int
    stdout: bytes
    exit_code: int | None
    ended: str
    seconds: float = 0.0

    @property
    def shown(self) -> tuple[bytes, int | None, str]:
        """What two runs of the same turn have in common: all but the time it took."""
        return self.stdout, self.exit_code, self.ended


def begin(trace: Trace, box: Runs) -> None:
    """Run the opening: environment, working directory, prelude."""
    result = box.run(trace.opening(), timeout=120.0)
    if result.exit_code != 0:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-300:]
        raise TraceRejected(
            f"trace {trace.name}: its prelude ended with {result.exit_code} ({result.ended}): {said}"
        )


def play(box: Runs, turn: TraceTurn) -> Output:
    """Run one turn."""
    result = box.run(turn.command, shell=turn.shell, timeout=turn.timeout)
    return Output(turn.turn, result.stdout, result.exit_code, result.ended, result.seconds)


def replay(
    trace: Trace,
    box: Runs,
    *,
    on_open: Callable[[], None] | None = None,
    on_turn: Callable[[TraceTurn, Output], None] | None = None,
    think_scale: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    last: int | None = None,
    opening: bool = True,
) -> list[Output]:
    """Play the turns up to ``last``, after the opening unless that was run already.

    ``on_open`` is called after the opening: take a checkpoint there, or turn 1 is charged with it. After
    each turn ``on_turn`` is called, then the model's think time passes, scaled.
    """
    if opening:
        begin(trace, box)
        if on_open is not None:
            on_open()
    outputs = []
    for turn in trace.turns[:last]:
        output = play(box, turn)
        outputs.append(output)
        if on_turn is not None:
            on_turn(turn, output)
        if turn.think * think_scale > 0:
            sleep(turn.think * think_scale)
    return outputs


def unmet(turn: TraceTurn, output: Output) -> str:
    """What the turn expects and the output does not hold; empty when all is met."""
    text = output.stdout.decode("utf-8", "surrogateescape")
    if output.ended != "exit":
        return f"turn {turn.turn}: ended by {output.ended}"
    if turn.expect_exit is not None and output.exit_code != turn.expect_exit:
        return f"turn {turn.turn}: exit code {output.exit_code}, {turn.expect_exit} expected"
    if turn.expect_stdout is not None and text != turn.expect_stdout:
        return f"turn {turn.turn}: output {text[:120]!r}, {turn.expect_stdout[:120]!r} expected"
    if turn.expect_match is not None and not re.fullmatch(turn.expect_match, text.rstrip(), re.DOTALL):
        return f"turn {turn.turn}: output {text[:120]!r} does not match {turn.expect_match!r}"
    return ""


def check(trace: Trace, outputs: Sequence[Output]) -> list[str]:
    """Every expectation of the trace that the outputs do not meet."""
    found = [unmet(turn, output) for turn, output in zip(trace.turns, outputs, strict=True)]
    return [sentence for sentence in found if sentence]


def recorded(trace: Trace, outputs: Sequence[Output]) -> Trace:
    """The trace with the outputs of a fault-free run as its expectations."""
    turns = tuple(
        replace(
            turn,
            expect_exit=output.exit_code,
            expect_stdout=output.stdout.decode("utf-8", "surrogateescape"),
            expect_match=None,
        )
        for turn, output in zip(trace.turns, outputs, strict=True)
    )
    return replace(trace, turns=turns)
