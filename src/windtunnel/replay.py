"""The decisions of a recorded run, made anew: by the policy that made them, or by another one.

A live run writes what its policies saw beside what they answered (`windtunnel.store.eventlog`). Since an
observation holds all that a decision depends on, the same policy must answer the same again; this is tested
for every capability. Another policy shows what it would have done at each of these points, and the twin what
that would have cost. What follows from a decision is not replayed: the next observation is the recorded one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from windtunnel.base import policyfile
from windtunnel.base.errors import UserError
from windtunnel.base.plain import TAG, from_plain, to_plain
from windtunnel.base.policyfile import Policy
from windtunnel.capabilities import Capability, find
from windtunnel.store import eventlog

Costs = dict[str, float]


@dataclass(frozen=True)
class Difference:
    """A decision that came out otherwise. ``number``: which one of the log's, from 1; ``t``: when it was
    made (time.time()). ``recorded`` and ``replayed`` are the two decisions, ``fields`` the names in which
    they differ, ``recorded_cost`` and ``replayed_cost`` what the twin takes them to cost (None: it prices
    none)."""

    number: int
    t: float
    observation: dict[str, Any]
    recorded: dict[str, Any]
    replayed: dict[str, Any]
    fields: tuple[str, ...]
    recorded_cost: Costs | None
    replayed_cost: Costs | None


@dataclass
class Part:
    """What became of one capability's decisions. ``recorded_by``: how many each policy made; ``policy``: who
    made them anew. Costs are sums over all of them, in SI units; None where the twin prices none."""

    capability: str
    recorded_by: dict[str, int]
    policy: str
    decisions: int = 0
    recorded_cost: Costs | None = None
    replayed_cost: Costs | None = None
    differences: list[Difference] = field(default_factory=list)

    @property
    def same(self) -> int:
        return self.decisions - len(self.differences)


@dataclass(frozen=True)
class Replay:
    """The replay of one log, capability by capability, in the order of their first decisions."""

    log: Path
    parts: list[Part]

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            "log": str(self.log),
            "capabilities": [{**to_plain(part), "same": part.same} for part in self.parts],
        }


def locate(run: str) -> Path:
    """The event log of ``run``: an id or the beginning of one, ``last``, a folder, a log, ``sandbox:NAME``.

    Raises:
        UserError: there is no such run, or it has no log.
    """
    kind, colon, name = run.partition(":")
    path = Path(run)
    if kind == "sandbox" and colon:
        from windtunnel.agents.sandbox.place import Home, checked_name, default_home

        folder = Home(default_home()).box(checked_name(name))
        if not folder.is_dir():
            raise UserError(f"replay: there is no sandbox {name!r} in {folder.parent.parent}")
        path = folder / eventlog.NAME
    elif run == "last" or not path.exists():
        from windtunnel.store.runs import Store

        run_record = Store.open().get(run)
        path, run = run_record.directory / eventlog.NAME, f"run {run_record.id} of {run_record.capability}"
    elif path.is_dir():
        path = path / eventlog.NAME
    if not path.is_file():
        raise UserError(f"replay: {run} has recorded no decisions: there is no {path}")
    return path


def replay(log: Path, policy: str | None = None) -> Replay:
    """Make all decisions in ``log`` anew.

    ``policy``: a name among the ``POLICIES`` of a capability in the log, or a Python file that defines
    ``decide``; None is the policy that made each of them. Where a log has decisions of several capabilities,
    those that do not know the name keep their own policy, and a file says in ``CAPABILITY`` which it is for.

    Raises:
        UserError: the log or the policy cannot be used.
        ScriptError: the policy in the file failed.
    """
    events = eventlog.decisions(log)
    if not events:
        raise UserError(f"replay: {log} has no decisions")
    by_policy: dict[str, Counter[str]] = {}
    for event in events:
        by_policy.setdefault(event["capability"], Counter())[event["policy"]] += 1
    capabilities = {
        name: find(name, lambda entry: "policy" in entry.rooms, who=f"replay: {log}") for name in by_policy
    }
    others = _others(capabilities, policy) if policy else {}
    parts = {
        name: Part(name, dict(counts), policy if name in others and policy else " and ".join(counts))
        for name, counts in by_policy.items()
    }
    decides = {name: _Decider(capability, others.get(name)) for name, capability in capabilities.items()}
    for number, event in enumerate(events, 1):
        part = parts[event["capability"]]
        decides[event["capability"]].again(log, number, event, part)
    return Replay(log, list(parts.values()))


def _others(capabilities: dict[str, Capability], policy: str) -> dict[str, Policy]:
    """The policy named or written in a file, by the capabilities of the log that it decides for."""
    if policy.endswith(policyfile.ENDING):
        decide, mine = policyfile.load(Path(policy))
        if mine is None and len(capabilities) > 1:
            raise UserError(
                f"{policy}: the log has decisions of {', '.join(capabilities)}; say which this policy is "
                f"for, such as CAPABILITY = {next(iter(capabilities))!r}"
            )
        if mine is not None and mine not in capabilities:
            raise UserError(
                f"{policy}: CAPABILITY {mine!r} has no decisions in this log, accepted is "
                f"{' or '.join(capabilities)}"
            )
        return {mine or next(iter(capabilities)): decide}
    named = {name: capability.room("policy").POLICIES for name, capability in capabilities.items()}
    policies_by_name = {name: policies[policy] for name, policies in named.items() if policy in policies}
    if not policies_by_name:
        accepted = "; ".join(f"{name}: {', '.join(policies)}" for name, policies in named.items())
        raise UserError(
            f"`policy`: {policy!r} is unknown; accepted are a file ending in .py or one of: {accepted}"
        )
    return policies_by_name


class _Decider:
    """Decides for one capability again, and prices both decisions."""

    def __init__(self, capability: Capability, other: Policy | None) -> None:
        self._room = capability.room("policy")
        self._other = other
        pricing = capability.pricing
        self._cost = getattr(import_module(pricing), "cost", None) if pricing else None

    def again(self, log: Path, number: int, event: eventlog.Event, part: Part) -> None:
        """One event: counted, and a difference where the policy now answers otherwise."""
        where = f"replay: {log}: decision {number} ({part.capability})"
        name = event["policy"]
        if self._other is None and name.endswith(policyfile.ENDING) and Path(name).is_file():
            self._other, _ = policyfile.load(Path(name))  # it was made by a user's own
        decide = self._other or self._room.POLICIES.get(name)
        if decide is None:
            raise UserError(f"{where}: policy {name!r} is unknown, say which with `policy`")
        try:
            observation = from_plain(self._room.Observation, event["observation"])
            recorded = from_plain(self._room.Decision, event["decision"])
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{where} is not one that this version reads: {error}") from None
        decision = decide(observation)
        if not isinstance(decision, self._room.Decision):
            raise UserError(f"{where}: the policy answered {decision!r}, accepted is {self._room.Decision}")
        # a price may be unknown for one kind of observation: the twin then says nothing of it
        recorded_cost = self._cost(observation, recorded) if self._cost else None
        replayed_cost = self._cost(observation, decision) if self._cost else None
        part.decisions += 1
        part.recorded_cost = _sum(part.recorded_cost, recorded_cost)
        part.replayed_cost = _sum(part.replayed_cost, replayed_cost)
        if decision == recorded:
            return
        before, after = to_plain(recorded, tag=True), to_plain(decision, tag=True)
        names = tuple(key for key in {**before, **after} if before.get(key) != after.get(key))
        part.differences.append(
            Difference(
                number, event["t"], event["observation"], before, after, names, recorded_cost, replayed_cost
            )
        )


def _sum(total: Costs | None, more: Costs | None) -> Costs | None:
    if more is None:
        return total
    return {key: (total or {}).get(key, 0.0) + more.get(key, 0.0) for key in {**(total or {}), **more}}


def short(value: Any, limit: int = 160) -> str:
    """A recorded value on one line: its kind and its fields, without what is empty, cut at ``limit``."""
    text = _short(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(
            f"{key}={_short(field_value)}"
            for key, field_value in value.items()
            if key != TAG and field_value not in (None, [], {}, "")
        )
        return f"{value.get(TAG, '')}({inner})"
    if isinstance(value, list):
        return (
            "["
            + ", ".join(_short(field_value) for field_value in value[:4])
            + (", …]" if len(value) > 4 else "]")
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)
