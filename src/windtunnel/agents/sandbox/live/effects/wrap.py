"""The journal as a decorator: a function whose effect happens at most once for the same arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from windtunnel.agents.sandbox.live.effects.journal import Check, Journal
from windtunnel.base.errors import UserError

TOKEN = "idempotency_key"


def at_most_once(
    journal: Journal,
    *,
    box: str | Callable[[], str],
    turn: int | Callable[[], int],
    intent: str = "",
    check: Check | None = None,
    idempotent: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that acts on the world outside: see ``journal`` for what is guaranteed.

    Its arguments, which JSON must be able to hold, are the payload; ``box`` and ``turn`` may be functions
    that say who acts, and when. A parameter named ``idempotency_key`` gets the key for the service; it is
    not for the caller to give. ``intent``: the function's own name where it is empty.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        takes_token = TOKEN in signature.parameters
        named = intent or function.__qualname__

        @functools.wraps(function)
        def performed(*args: Any, **kwargs: Any) -> Any:
            if TOKEN in kwargs:
                raise UserError(f"effects: {named}: {TOKEN} is given by the journal, not by the caller")
            bound = signature.bind_partial(*args, **kwargs)
            bound.apply_defaults()
            payload = {name: value for name, value in bound.arguments.items() if name != TOKEN}

            def call(token: str) -> Any:
                return function(*args, **kwargs, **({TOKEN: token} if takes_token else {}))

            return journal.perform(
                box() if callable(box) else box,
                turn() if callable(turn) else turn,
                named,
                call,
                payload=payload,
                check=check,
                idempotent=idempotent,
            )

        return performed

    return decorate
