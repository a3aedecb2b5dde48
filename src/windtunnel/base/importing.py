"""Imports without the garbage collector, and a word with a module that is imported later.

What modules make is there to stay, and the collector would go through all of it again and again. Looking
through it costs a fourth of the time of importing torch, and for the rest of the process's life again at each
full collection; so it is left out of them, too.
"""

from __future__ import annotations

import gc
import importlib.abc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Import within this. The collector goes on afterwards, if it was on, and passes over what is there."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module ``name`` once somebody has imported it, before he sees it."""
    sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others: Iterator[Any] = (finder for finder in sys.meta_path if finder is not self)
        answers = (finder.find_spec(name, path, target) for finder in others)
        spec: ModuleSpec | None = next((spec for spec in answers if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        loader.exec_module = exec_module
        return spec
