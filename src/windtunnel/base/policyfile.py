"""A user's own policy: a Python file that defines ``decide``, and in ``CAPABILITY`` for which it decides."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from windtunnel.base.errors import ScriptError, UserError

Policy = Callable[[Any], Any]
ENDING = ".py"
"""How the name of such a file ends, and that of no policy of windtunnel's."""


def load(path: Path, name: str = "policy") -> tuple[Policy, str | None]:
    """``decide`` and ``CAPABILITY`` of the file that the parameter ``name`` says; when it raises,
    `ScriptError` names the file.

    Raises:
        UserError: there is no such file, or no ``decide`` in it.
        ScriptError: the file failed.
    """
    if not path.is_file():
        raise UserError(f"`{name}`: there is no file {path}")
    module = ModuleType(f"policy_{path.stem}")
    module.__file__ = str(path)
    try:
        # not by an importer: its cache takes a file that was saved twice in a second for the one before
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:
        raise ScriptError(f"{path} failed: {error}", traceback.format_exc()) from error
    decide = getattr(module, "decide", None)
    if not callable(decide):
        raise UserError(f"{path}: defines no function decide(observation)")

    def guarded(observation: Any) -> Any:
        try:
            return decide(observation)
        except Exception as error:
            raise ScriptError(f"{path}: decide failed: {error}", traceback.format_exc()) from error

    return guarded, getattr(module, "CAPABILITY", None)
