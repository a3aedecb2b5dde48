"""A journal of effects on the world outside: what a rollback cannot take back must not happen twice.

A sandbox that is restored does its work since the checkpoint again. Files and processes bear that; a payment
does not. So such a call goes through ``Journal.perform``, which writes down *planned* before the call and
*done* with the result after it. The journal lies outside the sandbox's root: a rollback leaves it as it is.

What is guaranteed, for calls of one effect (the same sandbox, or forks since before it, the same ``key``):

- At most once. A call whose end is not known (the process died between planned and done, or the call raised
  something that does not say) is never made again; ``perform`` raises ``EffectInDoubt``.
- Exactly once, if in addition the service can tell: either it honours the idempotency key that ``call`` is
  given (say so by ``idempotent=True``: the call is then made again with the same key), or ``check`` asks it
  whether the effect with that key happened. Then doubt is settled at the next ``perform``.
- A call that raises ``NotDone`` did not happen; it is made again when it is next asked for.
- The result of a done effect is returned without a call, for as long as the journal exists.

Not guaranteed: anything about effects that are not named by the same key. Without ``key`` the key is the hash
of the intent and its payload, so that asking twice for the same thing is one effect; whoever wants it twice
gives two keys. Forks share the effects of the turns before the fork; later ones are each fork's own.

Source: the write-ahead rule of databases; Crab (arXiv 2604.28138) names such effects as outside its scope.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windtunnel.agents.sandbox.effects_ledger import Ledger, held, identity
from windtunnel.base.errors import UserError

State = Literal["planned", "done", "failed", "unknown"]
Check = Callable[[str], Any]
"""Asks the service, by idempotency key, whether the effect happened. Returns its result (anything JSON can
hold, not None) when it did, None when it certainly did not, and raises when it cannot tell."""


class EffectError(Exception):
    """A fault of the journal, or an effect whose outcome cannot be given."""


class EffectInDoubt(EffectError):
    """The effect may have happened or not. It is not tried again."""


class EffectUnderWay(EffectError):
    """Another thread or process is performing this effect, and did not end within the time allowed."""


class NotDone(Exception):
    """Raised by a call to say that its effect certainly did not happen: it may be tried again."""


@dataclass(frozen=True)
class Effect:
    """One entry of the journal. ``line``: the lineage it belongs to, its sandbox's own or an ancestor's.
    ``turn``: the turn in which it was last tried. ``token``: the idempotency key. ``fault``: what the call
    raised, where it did."""

    box: str
    line: int
    key: str
    intent: str
    turn: int
    state: State
    token: str
    result: Any
    fault: str
    planned: float
    ended: float


class Journal:
    """The effects of many sandboxes, in one SQLite file. Any number of threads and processes may share it."""

    wait_seconds = 60.0
    """For which an effect that another one performs is waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ledger = Ledger(path)

    def perform(
        self,
        box: str,
        turn: int,
        intent: str,
        call: Callable[[str], Any],
        *,
        payload: Any = None,
        key: str | None = None,
        check: Check | None = None,
        idempotent: bool = False,
    ) -> Any:
        """Make an effect happen, or give the result of the time it did.

        ``turn``: number of the turn under way (one more than the turns that have ended). ``intent``: what
        kind of effect, in words. ``payload``: what it is done with, anything JSON can hold; with ``intent``
        it makes the key where ``key`` is not given. ``call`` gets the idempotency key and returns anything
        JSON can hold.

        Raises EffectInDoubt, EffectUnderWay, or what ``call`` raised.
        """
        if not box or not intent or turn < 0:
            raise UserError(
                f"effects: box {box!r}, intent {intent!r} and turn {turn} are not accepted; "
                "name both, and count turns from 0"
            )
        key = key if key is not None else identity(intent, payload)
        known = self._find(box, key)
        if known is not None and known.state == "done":
            return _result(known)
        own = self._ledger.line(box)
        with contextlib.ExitStack() as locks:
            locks.enter_context(self._alone(box, own, key))
            known = self._find(box, key)
            if known is not None and known.line != own and known.state in ("planned", "unknown"):
                # its sandbox may be in the middle of it just now
                locks.enter_context(self._alone(box, known.line, key))
                known = self._find(box, key)
            if known is not None and known.state == "done":
                return _result(known)
            token, doubt = _token(box, key), False
            if known is not None and known.line == own:
                token = known.token
            if known is not None and known.state in ("planned", "unknown"):
                if idempotent:
                    # the same effect still: forks since its first try go on to share the doubt
                    token, turn, doubt = known.token, known.turn, True
                else:
                    happened = self._ask(known, check)
                    if happened is not None:
                        return happened
            self._ledger.plan(box, key, intent, turn, token)
            return self._make(box, key, token, call, doubt)

    def effects(self, box: str) -> list[Effect]:
        """All effects that a sandbox sees, its ancestors' before the fork too, oldest first."""
        return [Effect(**row) for row in self._ledger.seen_by(box)]

    def fork(self, source: str, name: str, turn: int) -> None:
        """``name`` begins as ``source`` was when its turn ``turn`` ended: effects until then are shared.

        Raises UserError when ``name`` has a past of its own; ``retire`` ends that.
        """
        if not self._ledger.fork(source, name, turn):
            raise UserError(f"effects: sandbox {name!r} has effects or an origin already; retire it first")

    def retire(self, box: str) -> None:
        """The sandbox is removed: one made later under its name starts with no effects. Its forks keep
        what they share with it."""
        self._ledger.retire(box)

    def close(self) -> None:
        """Close the file."""
        self._ledger.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _find(self, box: str, key: str) -> Effect | None:
        row = self._ledger.find(box, key)
        return Effect(**row) if row is not None else None

    def _ask(self, known: Effect, check: Check | None) -> Any:
        """The result, if the effect in doubt happened after all; None if it did not. Else EffectInDoubt."""
        what = f"effect {known.intent!r} of sandbox {known.box} (turn {known.turn}, key {known.token})"
        if check is None:
            raise EffectInDoubt(
                f"{what} may have happened: {known.fault or 'its process ended during the call'}; "
                "it is not tried again"
            )
        try:
            happened = check(known.token)
        except Exception as error:
            raise EffectInDoubt(f"{what} may have happened, and the check failed: {error}") from error
        if happened is not None:
            self._ledger.end(known.box, known.key, "done", result=_encoded(happened))
        return happened

    def _make(self, box: str, key: str, token: str, call: Callable[[str], Any], doubt: bool) -> Any:
        try:
            result = call(token)
        except NotDone as error:
            # that this call did nothing says nothing about an earlier one
            self._ledger.end(box, key, "unknown" if doubt else "failed", fault=str(error))
            raise
        except BaseException as error:
            self._ledger.end(box, key, "unknown", fault=f"{type(error).__name__}: {error}")
            raise
        try:
            text = _encoded(result)
        except (TypeError, ValueError) as error:
            self._ledger.end(box, key, "done", fault=f"its result cannot be recorded: {error}")
            raise EffectError(
                f"effect of sandbox {box} happened, but JSON cannot hold its result: {error}"
            ) from error
        self._ledger.end(box, key, "done", result=text)
        return result

    @contextlib.contextmanager
    def _alone(self, box: str, line: int, key: str) -> Iterator[None]:
        """Be the only one on this machine that performs this effect. A process that dies lets go."""
        deadline = time.monotonic() + self.wait_seconds
        with contextlib.ExitStack() as lock:
            while not lock.enter_context(held(self.path, f"{line}\0{key}")):
                lock.close()
                if time.monotonic() >= deadline:
                    raise EffectUnderWay(
                        f"an effect of sandbox {box} is being performed by someone else, for more than "
                        f"{self.wait_seconds:g} s"
                    )
                time.sleep(0.005)
            yield


def _result(effect: Effect) -> Any:
    if effect.fault:
        raise EffectError(f"effect {effect.intent!r} of sandbox {effect.box} happened, but {effect.fault}")
    return effect.result


def _encoded(result: Any) -> str:
    return json.dumps(result, allow_nan=False)


def _token(box: str, key: str) -> str:
    """The idempotency key: new for each effect, so that a name used again cannot meet an old one."""
    seed = f"{box}\0{key}\0{time.time_ns()}"
    return "windtunnel-" + hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()


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
    """Decorate a function that acts on the world outside: the module says what is guaranteed.

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
