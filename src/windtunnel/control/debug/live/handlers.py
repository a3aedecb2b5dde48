"""The functions of a service, by the place that a trace names, and changed ones from a file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.store.transactions import Handler


def load(place: str, path: Sequence[str] = ()) -> Mapping[str, Handler]:
    """The dict at ``place``, ``MODULE:NAME`` or ``FILE.py:NAME``. ``path``: where modules are also searched.

    Raises:
        UserError: there is no such module, file or dict.
        ScriptError: it failed while it was loaded.
    """
    module, _, name = place.rpartition(":")
    before = list(sys.path)
    beside = [str(Path(module).absolute().parent)] if module.endswith(".py") else []
    sys.path[:] = list(dict.fromkeys([*beside, *before, *path]))
    try:
        if module.endswith(".py"):
            found = vars(_executed(Path(module)))
        else:
            found = vars(import_module(module))
    except (ImportError, ValueError) as error:
        raise UserError(f"`handlers`: {place!r}: {error}; accepted is MODULE:NAME or FILE.py:NAME") from error
    finally:
        sys.path[:] = before
    handlers = found.get(name)
    if not isinstance(handlers, Mapping) or not all(map(callable, handlers.values())):
        raise UserError(f"`handlers`: {place!r} is no dict of functions by their names")
    return handlers


def changed(handlers: Mapping[str, Handler], place: str, code: Path) -> dict[str, Handler]:
    """``handlers``, and in their place those that the file ``code`` has in a dict of the same name.

    Raises:
        UserError: it has no such dict, or one of other handlers.
    """
    found = load(f"{code}:{place.rpartition(':')[2]}")
    for name in found:
        if name not in handlers:
            raise UserError(f"{code}: {name!r} was not recorded; accepted are {', '.join(handlers)}")
    return {**handlers, **found}


def _executed(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"`code`: there is no file {file}")
    module: Any = ModuleType(f"windtunnel_handlers_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look there for their annotations
    try:
        # not by an importer: its cache takes a file that was saved twice in a second for the one before
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    except Exception as error:
        raise ScriptError(f"{file} failed: {error}", traceback.format_exc()) from error
    return module  # type: ignore[no-any-return]
