"""Fault injection at named points: short texts say what strikes there, and how often.

A program passes points by name (or `inject_at` makes a method one); texts such as ``kill:rank=3,step=5`` say
what strikes, whom and when, and reach the program with its options or in a message. Which fields there are
and when one applies is the program's to say; what is the same for all stands here: taking the text apart,
counting injections over all processes of a run, and injecting one into a process.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError


class InjectedError(RuntimeError):
    """What ``raise`` raises in the program."""


def fields(text: str, accepted: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, str]]:
    """Action and fields of ``ACTION:name=value,name=value``. ``accepted``: names of fields by action.

    Raises:
        UserError: it is not understood; names the text, the field and what is accepted.
    """
    action, _, rest = text.strip().partition(":")
    if action not in accepted:
        raise refused(text, f"unknown action {action!r}", "one of " + ", ".join(accepted))
    values: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        name, equals, value = part.partition("=")
        if not equals or name not in accepted[action]:
            names = "name=value with one of " + ", ".join(accepted[action])
            raise refused(text, f"unknown field {part!r}", names)
        if name in values:
            raise refused(text, f"{name} is given twice", "one value for each field")
        values[name] = value
    return action, values


def refused(text: str, what: str, accepted: str) -> UserError:
    return UserError(f"fault {text!r}: {what}; accepted: {accepted}")


class InjectionCounts:
    """How often each fault of a run was injected, counted over its processes: one file a time in ``folder``,
    made exclusively, so a fault is injected once also when several processes pass its point at once, or a new
    process passes it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def count(self, fault: int) -> int:
        return len(list(self._folder.glob(f"{fault}.*")))

    def claim(self, fault: int, nth: int) -> bool:
        """Whether this process is the one to inject it."""
        try:
            os.close(os.open(self._folder / f"{fault}.{nth}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def inject(action: str, text: str) -> None:
    """Hit this process: ``kill`` or ``stop`` (freeze) it, or ``raise`` an error.

    Raises:
        InjectedError: by ``raise``.
    """
    match action:
        case "kill" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        case _:
            raise InjectedError(f"injected: {text}")


def inject_at(owner: Any, method: str, when: str, nth: int, action: str = "kill") -> None:
    """Make a method of ``owner`` a named point: its ``nth`` call strikes, ``before`` or ``after`` it has done
    its work."""
    plain: Callable[..., Any] = getattr(owner, method)
    calls = 0

    @functools.wraps(plain)
    def point(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == nth  # of this call, whatever other threads do meanwhile
        if now and when == "before":
            inject(action, method)
        result = plain(*arguments, **options)
        if now and when == "after":
            inject(action, method)
        return result

    setattr(owner, method, point)
