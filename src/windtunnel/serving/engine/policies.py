"""The policies of a run, by name or as a user's file, and what is written of their decisions.

A user's file is loaded, and what it decides is held against what it may decide, so that a wrong rule is a
sentence and no request's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base import policyfile
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.base.policyfile import Policy
from windtunnel.serving.branching import policy as branching
from windtunnel.serving.engine import policy as admission
from windtunnel.serving.engine.policy.scheduler import Log
from windtunnel.serving.prefixcache import policy as prefixcache
from windtunnel.store.eventlog import EventLog

BRANCHING, ADMISSION, PREFIXES = "serving.branching", "serving.engine", "serving.prefixcache"
ALWAYS = ("engine", "time")
"""Events that are logged whatever the step."""
Note = Callable[..., object]
"""(kind, fields): an event of the log."""


def unheard(kind: str, **values: Any) -> None:
    """A `Note` of no log."""


def event_notes(log: EventLog, every: int, steps: Callable[[], int]) -> tuple[Log, Note]:
    """What takes decisions, and what takes other events, of one of ``every`` steps into ``log``; ``steps``
    were taken until now."""

    def decided(capability: str, policy: str, observation: object, decision: object) -> None:
        if steps() % every == 0:
            log.decision(capability, policy, observation, decision)

    def note(kind: str, **values: Any) -> None:
        if kind in ALWAYS or steps() % every == 0:
            log.append(kind, **values)

    return decided, note


def choose_policies(policy: str, late: str, rules: str = "none") -> tuple[dict[str, str], dict[str, Policy]]:
    """Who decides, for what ``branching``, ``admission`` and ``rules`` say: names by capability, and of these
    the functions that are a user's. A file that does not say what it is for decides which branches take part;
    one for admission leaves these to the default.

    Raises:
        UserError: a name is unknown, or the file cannot be used.
        ScriptError: the file failed.
    """
    named, own = {BRANCHING: policy, ADMISSION: late, PREFIXES: rules}, dict[str, Policy]()
    if policy.endswith(policyfile.ENDING):
        path = Path(policy).absolute()
        decide, mine = policyfile.load(path, "branching")
        mine = BRANCHING if mine is None else mine
        if mine not in _RULES:
            raise UserError(f"{path}: CAPABILITY {mine!r} is not accepted, use {' or '.join(_RULES)}")
        named |= {BRANCHING: "taper", mine: str(path)}
        own[mine] = _checked(path, decide, *_RULES[mine])
    for field, name, accepted in (
        ("branching", BRANCHING, branching.POLICIES), ("admission", ADMISSION, admission.POLICIES),
        ("rules", PREFIXES, prefixcache.POLICIES),
    ):  # fmt: skip
        if name not in own and named[name] not in accepted:
            more = ", or a file ending in .py" if name == BRANCHING else ""
            raise UserError(
                f"serve: `{field}` {named[name]!r} is unknown; accepted are {', '.join(accepted)}{more}"
            )
    return named, own


def _checked(path: Path, decide: Policy, kind: type, right: Callable[[Any, Any], bool]) -> Policy:
    def checked(observation: Any) -> Any:
        decision = decide(observation)
        if not isinstance(decision, kind):
            raise ScriptError(
                f"{path}: decide answered {decision!r}, accepted is a {kind.__module__}.Decision"
            )
        if not right(observation, decision):
            raise ScriptError(f"{path}: decide answered {decision!r}, which is not possible here")
        return decision

    return checked


def _admitted(observation: branching.Observation, decision: branching.Decision) -> bool:
    """Whether these branches are there, each once, and there is room for them."""
    candidates = {(candidate.request, candidate.unit) for candidate in observation.candidates}
    return (
        len(set(decision.admitted) & candidates) == len(decision.admitted) <= observation.room
        and decision.holds >= 1
    )


def _planned(observation: admission.Observation, decision: admission.Decision) -> bool:
    """Whether these requests wait, those that are admitted fit, what is prefilled is to be prefilled and no
    more than a chunk, and anything is done at all."""
    waiting = {waiting.request: waiting for waiting in observation.waiting}
    moved = [*decision.admit, *decision.refuse]
    admitted = [waiting[number] for number in decision.admit if number in waiting]
    stops = {(filling.request, filling.unit): filling.stop for filling in observation.filling}
    stops |= {(waiting.request, 0): waiting.stop for waiting in admitted}
    return (
        len(set(moved) & waiting.keys()) == len(moved)
        and len(admitted) <= observation.slots
        and sum(waiting.reserve for waiting in admitted) <= observation.free
        and len({part[:2] for part in decision.prefill}) == len(decision.prefill)
        and all(1 <= tokens <= stops.get((number, unit), 0) for number, unit, tokens in decision.prefill)
        and sum(tokens for _, _, tokens in decision.prefill) <= observation.chunk
        and bool(moved or decision.prefill or observation.rows)
    )


_RULES: dict[str, tuple[type, Callable[[Any, Any], bool]]] = {
    BRANCHING: (branching.Decision, _admitted), ADMISSION: (admission.Decision, _planned),
}  # fmt: skip
