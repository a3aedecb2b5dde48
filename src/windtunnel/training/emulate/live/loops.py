"""A loop of the user's program that waits for a value of the device which never changes.

``while x.sum().item() < 100`` issues operators, allocates, and may print and write files, for ever: on the
absent device the host reads the same stand-in each time. What shows it is that such a loop does nothing for
the first time: the same places read the same answers, no operator or collective comes that was not there
before (each row of their tables is distinct), and no optimiser steps. What shows that it is no long
evaluation is its source: what is in a ``for`` loop ends with what it iterates over. While a ``while`` of the
user's files is like that, it does not get on (`progress`), and its place lies in a file.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from windtunnel.training.emulate.live import failure

OFTEN = 20
"""Times that a place reads the same answer, after which its loop is looked at."""
MOST = 10_000
"""Different reads that are remembered."""


@dataclass
class Loops:
    """``waiting``: the file that names the loop while there is one. ``count``: of all that is distinct and
    was recorded."""

    waiting: Path
    count: Callable[[], int]
    _known: set[tuple[CodeType, int, float]] = field(default_factory=set)
    _again: Counter[tuple[CodeType, int, float]] = field(default_factory=Counter)
    _counted: int = 0
    _said: bool = False

    def read(self, frame: FrameType | None, answer: float) -> None:
        """The host has read ``answer`` of the device, for the user's ``frame``."""
        if frame is None:
            return
        read, counted = (frame.f_code, frame.f_lasti, answer), self.count()
        if counted != self._counted or read not in self._known:
            self.anew()
            self._counted = counted
            if len(self._known) == MOST:
                self._known.clear()
            self._known.add(read)
        self._again[read] += 1
        if not self._said and self._again[read] % OFTEN == 0 and (place := _endless(frame)):
            self._said = True
            self.waiting.write_text(place)

    def anew(self) -> None:
        """Something has happened for the first time."""
        self._again.clear()
        if self._said:
            self._said = False
            self.waiting.unlink()


def _endless(frame: FrameType | None) -> str:
    """The innermost loop of the user's files around ``frame``, if it is a ``while``; else nothing."""
    while frame is not None:
        code = frame.f_code
        loop = innermost(code.co_filename, frame.f_lineno) if failure.is_own(code.co_filename) else None
        if loop is not None:
            is_while = isinstance(loop, ast.While)
            return failure.name_place(code.co_filename, loop.lineno, code.co_name) if is_while else ""
        frame = frame.f_back
    return ""


def innermost(filename: str, line: int) -> ast.While | ast.For | ast.AsyncFor | None:
    """The loop of a source around a line, within the function that the line is in."""
    around = [node for node in _nodes(filename) if node.lineno <= line <= (node.end_lineno or 0)]
    last = max(around, key=lambda node: node.lineno, default=None)
    return last if isinstance(last, ast.While | ast.For | ast.AsyncFor) else None


@functools.cache
def _nodes(filename: str) -> list[ast.stmt]:
    """Loops and functions."""
    kinds = ast.While | ast.For | ast.AsyncFor | ast.FunctionDef | ast.AsyncFunctionDef
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]
