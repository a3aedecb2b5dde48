"""The engine, branching, the prefix cache and variants: runs of the real ones, and drawn questions beside.

Rules that short runs do not reach are asked by observations that are drawn (`parity.questions`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity
from parity.questions import asked, questions, variants_questions
from support.engine import engines
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.serving.branching import policy as branching
from windtunnel.serving.engine import policy as admission
from windtunnel.serving.engine.model import InferenceRequest, StepTime
from windtunnel.serving.engine.policy.step import Depths, StepLimits
from windtunnel.serving.engine.twin.world import serve
from windtunnel.serving.prefixcache import policy as prefixcache
from windtunnel.serving.variants import policy as variants
from windtunnel.serving.variants.model import CPU, Query, Variant
from windtunnel.serving.variants.policy.desk import (
    BatchRun,
    Desk,
    Effect,
    Hosted,
    RequestFailure,
    Start,
    Stop,
)
from windtunnel.serving.variants.policy.desk import VariantRequest as Waits
from windtunnel.store.eventlog import EventLog

KEPT = {
    "serving.engine": ("serving.branching", "engine", "arrives", "looked", "step"),
    "serving.branching": ("step",),
    "serving.prefixcache": ("looked", "step", "copied", "prefixes"),
}
"""Of the engine's log what is kept beside a capability's own decisions."""


def recorded(name: str, room: Any) -> Callable[[Path], Sequence[Path]]:
    def record(folder: Path) -> Sequence[Path]:
        kept, path = (name, *KEPT[name]), folder / "kept.jsonl"
        lines = engines(folder).read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if _what(json.loads(line)) in kept))
        log = EventLog(path)
        log.append("drawn")
        asked(log, name, room, questions(name))
        log.close()
        return [path]

    return record


def _what(event: Event) -> str:
    return str(event["capability"] if event["kind"] == "decision" else event["kind"])


def steps(events: Sequence[Event], *names: str) -> Iterator[tuple[list[Event], Event]]:
    """Each step with the decisions of these capabilities that were made for it."""
    decisions: list[Event] = []
    for event in events:
        if event["kind"] == "decision" and event["capability"] in names:
            decisions.append(event)
        elif event["kind"] == "step":
            yield decisions, event
            decisions = []


def engine_effects(events: Sequence[Event]) -> list[str]:
    """Who was admitted, refused and prefilled in each step."""
    wrong, waited = [], False
    for number, (decisions, step) in enumerate(steps(events, "serving.engine"), 1):
        decided = [event["decision"] for event in decisions]
        filled = [part for decision in decided for part in decision["prefill"]]
        admitted = [request for part in decided for request in part["admit"]]
        if (late := [request for part in decided for request in part["refuse"]]) != step["refused"]:
            wrong.append(f"step {number}: refused {step['refused']}, decided {late}")
        if [request for request, _ in step.get("admitted", ())] != admitted:
            wrong.append(f"step {number}: admitted {step.get('admitted')}, decided {admitted}")
        computed = step.get("computed", [])
        if computed[: len(filled)] != filled or any(entry[2] != 1 for entry in computed[len(filled) :]):
            wrong.append(f"step {number}: computed {computed}, decided {filled}")
        for event in decisions:
            observation = event["observation"]
            waited |= (
                any(part["reserve"] > observation["free"] for part in observation["waiting"])
                and observation["slots"] > 0
            )
    return wrong if waited else [*wrong, "nobody waited for memory"]


def branching_effects(events: Sequence[Event]) -> list[str]:
    """Those that were to take part were computed, and of the other candidates none."""
    wrong = []
    for number, (decisions, step) in enumerate(steps(events, "serving.branching"), 1):
        computed = {(request, unit) for request, unit, _ in step.get("computed", ())}
        for event in decisions[-1:]:
            observation = event["observation"]
            chosen = {tuple(unit) for unit in event["decision"]["admitted"]}
            asked = {(part["request"], part["unit"]) for part in observation["candidates"]}
            if computed & asked != chosen:
                wrong.append(f"step {number}: {computed & asked} took part, decided {chosen}")
    return wrong


def prefix_effects(events: Sequence[Event]) -> list[str]:
    """What was used, copied and evicted is what was decided."""
    wrong, looked = [], dict[int, Event]()
    lookup: Event = {}
    victims = set[int]()
    for event in events:
        match event["kind"], (event.get("observation") or {}).get("is"):
            case "decision", "Lookup":
                lookup = event
            case "decision", "Eviction":
                victims.add(event["decision"]["node"])
            case "looked", _:
                looked[event["request"]] = event
                decided = [lookup["observation"]["usable"], *lookup["decision"].values()]
                if [event["cached"], "Retention", event["stops"], event["end"]] != [decided[0], *decided[1:]]:
                    wrong.append(f"request {event['request']}: looked up {event}, decided {decided}")
            case "step", _:
                for request, depth in event.get("admitted", ()):
                    if depth != looked[request]["cached"]:
                        wrong.append(f"request {request} began with {depth}, decided {looked[request]}")
            case "copied", _:
                if event["depths"] != looked[event["request"]]["stops"]:
                    wrong.append(f"request {event['request']}: {event['depths']}, {looked[event['request']]}")
            case "prefixes", _:
                pieces = {piece["node"]: piece for piece in event["pieces"]}
                if not victims <= {node for node, piece in pieces.items() if _gone(piece)}:
                    wrong.append(f"{event['pieces']}, decided {victims}")
                wrong += [f"{piece}" for piece in pieces.values() if not _as_told(piece)]
                victims = set()
    return wrong


def _gone(piece: Event) -> bool:
    return piece["do"] in ("evict", "strip", "merge")


def _as_told(piece: Event) -> bool:
    """Memory has what it should after this."""
    match piece["do"]:
        case "split":
            return True
        case "make":
            return bool(piece["kv"])
        case "hold":
            return bool(piece["state"])
        case "strip":
            return not piece["state"]
    return not piece["kv"]


@dataclass
class Looked:
    """The twin's prefix cache: what live's said."""

    answers: dict[int, deque[tuple[int, Depths]]]
    clock: Any = None

    def look(self, request: InferenceRequest) -> tuple[int, Depths]:
        return self.answers[request.id].popleft()

    def admitted(self, number: int) -> int:
        return 0

    def read(self, request: InferenceRequest) -> None: ...
    def left(self, number: int) -> None: ...


@dataclass
class Took:
    """The twin's steps: what live's took."""

    seconds: deque[float]
    kv: float = 0.0

    def of(self, rows: int, read: int, prefill: Iterable[tuple[int, int]] = ()) -> float:
        return self.seconds.popleft()


def engine_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """Decisions of admission and of branching, with the arrivals, lookups and seconds of live."""
    pairs: list[tuple[Any, Any]] = []
    begins = [at for at, event in enumerate(events) if event["kind"] in ("engine", "drawn")]
    for begin, end in pairwise(begins):
        some = events[begin:end]
        arrived = [
            event for event in some if event["kind"] == "arrives" and event["refused"] in ("", "queue")
        ]
        looked: dict[int, deque[tuple[int, Depths]]] = {}
        for event in some:
            if event["kind"] == "looked":
                looked.setdefault(event["request"], deque()).append((event["cached"], tuple(event["stops"])))
        took = Took(deque(event["ended"] - event["began"] for event in some if event.get("computed")))
        decisions: list[Any] = []
        served = serve(
            [from_plain(InferenceRequest, event["request"]) for event in arrived],
            from_plain(StepLimits, some[0]["limits"]), from_plain(StepTime, some[0]["time"]), jump=False,
            truth=took, prefixes=Looked(looked),  # type: ignore[arg-type]
            log=lambda name, policy, observation, decision: decisions.append(to_plain(decision, tag=True)),  # noqa: B023
        )  # fmt: skip
        live = [event["decision"] for event in some if event["kind"] == "decision"]
        pairs += zip_longest(live, decisions)
        late = {number for event in some for number in event.get("refused", ()) if event["kind"] == "step"}
        left = [event["refused"] == "queue" or event["request"]["id"] in late for event in arrived]
        pairs.append((left, served.refused.tolist()))
    return pairs


def in_time(events: Sequence[Event]) -> list[Event]:
    """Events of vLLM as the twin lives them: a request comes when its step is planned."""
    planned: list[Event] = json.loads(json.dumps(events))
    for event in planned:
        if event["kind"] == "arrives":
            request = event["request"]
            request["objective"]["ttft"] += request["arrival"] - event["now"]
            request["arrival"] = event["now"]
    return planned


def variants_recorded(folder: Path) -> Sequence[Path]:
    from support.variants import asked as queried

    log = EventLog(queried(folder))
    log.append("drawn")
    asked(log, "serving.variants", variants, variants_questions())
    log.close()
    return [log.path]


def desk(events: Sequence[Event]) -> tuple[list[Any], list[list[Any]]]:
    """What the desk decides and says is to be done if it is told, at the same times, what live's was."""
    decisions: list[Any] = []
    done: list[list[Any]] = []
    policy = next(event["policy"] for event in events if event["kind"] == "decision")

    def decide(observation: Any) -> Any:
        decisions.append(variants.POLICIES[policy](observation))
        return decisions[-1]

    def effects(some: Iterable[Effect]) -> None:
        for effect in some:
            match effect:
                case BatchRun(group, batch):
                    done.append(["runs", group.variant.name, [each.query.id for each in batch]])
                case RequestFailure(request, _, refused, after) if request.query.id not in left:
                    done.append(["fails", request.query.id, "Infeasible" if refused else "Unanswered", after])
                case Start(group, due):
                    done.append(["loads", group.variant.name, due])
                case Stop(group):
                    done.append(["stops", group.variant.name])

    requests: dict[int, Waits] = {}
    left = set[int]()
    for event in events:
        now, kind, variant = event.get("now", 0.0), event["kind"], event.get("variant", "")
        match kind:
            case "service":
                known = [from_plain(Variant, fields) for fields in event["variants"]]
                there = Desk(known, decide, pinned=event["pinned"], grows=False)
                host = Hosted(name="this host", hardware=CPU, cores=event["cores"], free=event["free"])
                there.hosts[host.name] = host
                groups = {variant.name: there.group(variant.name, host.name) for variant in known}
            case "arrives":
                request = Waits(from_plain(Query, event["query"]), now, kind=event["alike"])
                requests[request.query.id] = request
                effects(there.ask(request, now))
            case "leaves":
                left.add(event["request"])
                there.leave(requests[event["request"]])
            case "loaded":
                effects(there.loaded(groups[variant], event["due"], now))
            case "unloadable":
                effects(there.unloadable(groups[variant], event["due"], event["why"], now))
            case "answered" | "died" | "refused":
                begun = [batch for batch, _ in groups[variant].begun.values()]
                batch = next(batch for batch in begun if [it.query.id for it in batch] == event["requests"])
                more = event["seconds"] if kind == "answered" else event["why"]
                effects(getattr(there, kind)(groups[variant], batch, more, now))
            case "second":
                host.free = event["free"]
                effects(there.second(now, {host.name: event["used"]}))
            case "responds":
                group = requests[event["request"]].group
                done.append([kind, event["request"], group.variant.name if group else ""])
            case "drawn":
                break
    return decisions, done


FIELDS = {
    "runs": ("variant", "requests"), "fails": ("request", "error", "after"), "loads": ("variant", "due"),
    "stops": ("variant",), "responds": ("request", "variant"),
}  # fmt: skip


def variants_effects(events: Sequence[Event]) -> list[str]:
    """Batches ran, replicas came and went, and queries were answered or refused as the desk says."""
    _, decided = desk(events)
    wrong = []
    for kind, fields in FIELDS.items():
        live = [[kind, *(event[field] for field in fields)] for event in events if event["kind"] == kind]
        said = [entry for entry in decided if entry[0] == kind]
        wrong += [f"{entry}, decided {other}" for entry, other in zip_longest(live, said) if entry != other]
    return wrong


def variants_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    begun = next(at for at, event in enumerate(events) if event["kind"] == "drawn")
    live = [event["decision"] for event in events[:begun] if event["kind"] == "decision"]
    return list(zip_longest(live, (to_plain(decision, tag=True) for decision in desk(events)[0])))


PARITY = {
    "serving.engine": Parity(recorded("serving.engine", admission), engine_effects, engine_twin),
    "serving.branching": Parity(recorded("serving.branching", branching), branching_effects),
    "serving.prefixcache": Parity(recorded("serving.prefixcache", prefixcache), prefix_effects),
    "serving.variants": Parity(variants_recorded, variants_effects, variants_twin),
}
ENGINE, CACHE, VARIANTS = "serving/engine/", "serving/prefixcache/", "serving/variants/"
MUTANTS = (
    Mutant("serving.engine", ENGINE + "policy/__init__.py", " or other.reserve > free", ""),
    Mutant(
        "serving.engine", ENGINE + "live/loop.py", 'events.append(Over(number, refused="late"))', "pass",
        live=True,
    ),
    Mutant(
        "serving.branching", "serving/branching/policy/__init__.py",
        "if seconds - base <= observation.rho * budget:", "if seconds - base <= budget:",
    ),
    Mutant(
        "serving.branching", ENGINE + "policy/scheduler.py", "branches += chosen.admitted",
        "branches += chosen.admitted[1:]", live=True,
    ),
    Mutant(
        "serving.prefixcache", CACHE + "policy/__init__.py", "places.add(lookup.matched)",
        "places.add(lookup.usable)",
    ),
    Mutant(
        "serving.prefixcache", ENGINE + "live/prefixes.py",
        "self.executor.free(nodes.pop(node))", "self._states(node, {})", live=True,
    ),
    Mutant(
        "serving.variants", VARIANTS + "policy/select.py",
        "if seconds <= left < inf or (left == inf and request.waiting < QUEUE):", "if True:",
    ),
    Mutant(
        "serving.variants", VARIANTS + "live/service.py", "group = self.groups[request.group.variant.name]",
        "group = first", live=True,
    ),
)  # fmt: skip
