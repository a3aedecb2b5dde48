"""What the user's loop does once in more steps than are looked at, read from its source."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from types import FrameType

from windtunnel.training.emulate.live import failure

NAMES = (ast.Name, ast.Attribute, ast.Constant, ast.Load)


def seldom(frame: FrameType | None, steps: int) -> Iterator[tuple[str, int]]:
    """The tests of a remainder (``if step % every == 0``) in the user's functions that run, where the divisor
    is known and greater than ``steps``: their places and divisors."""
    while frame is not None:
        code, tree = frame.f_code, ast.Module([], [])
        if failure.is_own(code.co_filename):
            with contextlib.suppress(OSError, SyntaxError):
                tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If)]
        for part in (part for test in tests for part in ast.walk(test)):
            if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Mod):
                continue
            every = None
            if all(isinstance(one, NAMES) for one in ast.walk(part.right)):
                with contextlib.suppress(Exception):
                    divisor = compile(ast.Expression(part.right), "", "eval")
                    every = eval(divisor, frame.f_globals, frame.f_locals)
            if type(every) is int and every > steps:
                line = part.lineno + max(code.co_firstlineno, 1) - 1
                yield failure.name_place(code.co_filename, line, code.co_name), every
        frame = frame.f_back
