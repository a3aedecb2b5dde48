"""The user's program as a module, as ``python -m`` and ``torchrun -m`` run it from the current folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from windtunnel.base.errors import UserError


@dataclass(frozen=True)
class Module:
    """A module's name, ``train`` or ``package.train``, and its arguments; a package is run by its
    ``__main__``."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"-m {self.module}"

    def check(self) -> None:
        """Look whether there is such a module, without importing anything of the user's.

        Raises:
            UserError: there is none, or it is a package that cannot be run.
        """
        here = f"from {Path.cwd()}"
        parts = self.module.split(".")
        is_file = parts[-1] == "py"
        if is_file or not all(part.isidentifier() for part in parts):
            instead = " (give its name, not its file)" if is_file else ""
            raise UserError(f"-m: {self.module!r} is not the name of a module{instead}")
        places: list[str] | None = [str(Path.cwd()), *sys.path]
        spec: ModuleSpec | None = None
        for place in range(len(parts)):
            name = ".".join(parts[: place + 1])
            if places is None:
                raise UserError(f"-m: {'.'.join(parts[:place])!r} is not a package, so it has no {name!r}")
            spec = _find(name, places)
            if spec is None:
                raise UserError(f"-m: there is no module {name!r} to be imported {here}")
            inside = spec.submodule_search_locations
            places = None if inside is None else list(inside)
        if places is not None and _find(f"{self.module}.__main__", places) is None:
            raise UserError(f"-m: {self.module!r} is a package without a __main__.py, which cannot be run")


def _find(name: str, places: list[str]) -> ModuleSpec | None:
    """As the import system would find it; only what was installed with a finder of its own is asked for by
    name."""
    found = PathFinder.find_spec(name, places)
    for finder in sys.meta_path if found is None else ():
        ask = getattr(finder, "find_spec", None)
        found = ask(name, places) if ask is not None else None
        if found is not None:
            break
    return found
