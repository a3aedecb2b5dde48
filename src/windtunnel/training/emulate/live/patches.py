"""The one way in which functions of PyTorch and of Python are replaced in the process of a rank."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def replaces(holder: Any, *names: str, everywhere: bool = False) -> Callable[[Function], Function]:
    """Put the decorated function in the place of a module's or class's functions of these names, or of its
    own; it is called with what was there before its arguments. ``everywhere``: also where another module of
    ``torch.distributed`` took that by name.

    Raises:
        AttributeError: this version of what holds it has no such function.
    """

    def put(function: Function) -> Function:
        for name in names or (function.__name__,):
            original = getattr(holder, name)
            replacement: Any = _calling(function, original)
            if isinstance(inspect.getattr_static(holder, name), staticmethod):
                replacement = staticmethod(replacement)
            setattr(holder, name, replacement)
            for path, module in list(sys.modules.items()) if everywhere else ():
                if path.startswith("torch.distributed") and vars(module).get(name) is original:
                    setattr(module, name, replacement)
        return function

    return put


def replaces_backward(function: Function) -> Function:
    """Put the decorated function in the place of autograd's way to run a backward pass."""
    import torch

    for module in (torch.autograd.graph, torch.autograd):
        replaces(module, "_engine_run_backward")(function)
    return function


def _calling(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return instead
