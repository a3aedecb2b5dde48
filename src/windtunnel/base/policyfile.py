"""A user's own policy: a Python file that defines ``decide``, and in ``CAPABILITY`` for which it decides."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from windtunnel.base.errors import ScriptError, UserError

Policy = Callable[[Any], Any]
ENDING = ".py"
"""How the name of such a file ends, and that of no policy of windtunnel's."""


def load(path: Path) -> tuple[Policy, str | None]:
    """``decide`` and ``CAPABILITY`` of the file; when it raises, `ScriptError` names the file.

    Raises:
        UserError: there is no such file, or no ``decide`` in it.
        ScriptError: the file failed.
    """
    spec = spec_from_file_location(f"policy_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"--policy: there is no file {path}")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
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
