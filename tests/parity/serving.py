"""The engine, branching, the prefix cache and variants: runs of the real ones, and drawn questions beside.

The engine runs in this process on a real model, with little memory. Its clock goes on only while a step is
computed, for as long as that really takes, so that the twin, which spends no time between steps, can be given
the very times. Rules that such short runs do not reach are asked by observations that are drawn.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import inf
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.serving.branching import policy as branching
from windtunnel.serving.branching.policy.predictor import BUCKETS, SPANS
from windtunnel.serving.engine import policy as admission
from windtunnel.serving.engine.model import Objective, Request, StepTime
from windtunnel.serving.engine.policy.step import Depths, Limits
from windtunnel.serving.engine.twin.world import serve
from windtunnel.serving.prefixcache import policy as prefixcache
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.variants import policy as variants
from windtunnel.serving.variants.model import CPU, Candidate, Held, Host, Query, Variant
from windtunnel.serving.variants.policy.desk import Desk, Effect, Fail, Hosted, Run, Start, Stop
from windtunnel.serving.variants.policy.desk import Request as Waits
from windtunnel.serving.variants.policy.scale import LEGAL, Fleet, Load, Measured, Running
from windtunnel.serving.variants.policy.select import Asked, Waiting
from windtunnel.store.eventlog import EventLog

TIME = StepTime(1e-3, 1e-5, 1e-7, 1e-5, 1e-9, 1e-4, 1e-4)
ROOM = 1.3
"""Times the largest request: two do not always fit."""
TICK = 2**20
"""Ticks a second: sums of such times are exact."""
RUNS = (
    # admission, branching, rules of the prefix cache, bytes of its files
    ("refuse", "eager", "density", 0),
    ("refuse", "taper", "block16", 1 << 20),
    ("defer", "strict", "three-lru", 1 << 20),
    ("wait", "cap2", "seglen", 0),
    ("wait", "off", "every32", 0),
)


@dataclass
class Stopwatch:
    """Seconds in which steps were computed."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def timed(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        from time import perf_counter

        def computed(*given: Any) -> Any:
            began = perf_counter()
            answer = compute(*given)
            self.now += int((perf_counter() - began) * TICK + 1) / TICK
            return answer

        return computed


def jobs(clock: Stopwatch) -> Iterator[list[Any]]:
    """What comes before each step: prompts that begin alike, branches, promises, and a queue that is full."""
    from windtunnel.serving.engine.live.loop import Branches, Job

    base, number = tuple(3 + 7 * at % 251 for at in range(60)), iter(range(100))

    def job(prompt: int, own: int, *stages: Any, **promised: float) -> Any:
        end = tuple(9 + (own + at) % 200 for at in range(own))
        return Job(next(number), clock(), base[:prompt] + end, stages, objective=Objective(**promised))

    parts = Branches(((5, 6), (7,), ()), (9, 4, 12), (9, 9))
    for at in range(3):
        yield [job(30, at, 3), job(45, 3 * at, 2, ttft=100.0, tpot=9.0)]
    yield [job(50, 9, 3, parts, 2, tpot=1e-9), job(40, 1, parts, ttft=100.0, tpot=9.0)]
    yield from [[]] * 12
    yield [job(1, 0, Branches(((), ()), (4, 2)), 3), job(50, 5, 3, ttft=1e-9), job(50, 6, 4)]
    yield from [[]] * 8
    yield [job(20, 7 + at, 9, ttft=1e-9 if at % 2 else inf) for at in range(9)]
    yield from [[]] * 12
    yield [job(60, 17 * at, 2, parts, 2, tpot=1e-4) for at in range(2)]


def engines(folder: Path) -> Path:
    """The log of all `RUNS`."""
    import torch

    from windtunnel.serving.engine.live.disk import Disk
    from windtunnel.serving.engine.live.families import load
    from windtunnel.serving.engine.live.loop import ROUNDED, Engine
    from windtunnel.serving.engine.live.prefixes import Prefixes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    executor, log = load("tiny-hybrid"), EventLog(folder / "engine.jsonl")
    compute, token = executor.step, max(1.0, executor.token_bytes * ROUNDED)
    for late, extend, rules, room in RUNS:
        clock = Stopwatch(1.0)
        executor.step = clock.timed(compute)  # type: ignore[method-assign]
        largest = 0

        def made(kv: int, note: Any) -> Any:
            (folder / late / extend).mkdir(parents=True, exist_ok=True)  # noqa: B023
            disk = Disk(folder / late / extend) if room else None  # noqa: B023
            kept = Prefixes(executor, rules, 1 << 17, log.decision, disk, room, 1e6, note)  # noqa: B023
            policies: dict[str, Any] = {"admission": late, "branching": extend}  # noqa: B023
            return Engine(
                executor, TIME, rows=5, kv=kv, chunk=24, queue=6, prefixes=kept, clock=clock,  # noqa: B023
                log=log.decision, note=note, **policies,
            )  # fmt: skip

        most = made(1 << 30, None).scheduler.most
        largest = max(most(job.request()) for some in jobs(clock) for job in some)
        engine = made(int(ROOM * largest * token), log.append)
        for some in jobs(clock):
            before = clock()
            for job in some:
                engine.add(job)
            engine.step()
            clock.now += 1 / TICK if clock() == before else 0.0  # what comes next comes later
        while engine.busy:
            report = engine.step()
            assert report is None or not report.failed, report.failed
    executor.step = compute  # type: ignore[method-assign]
    torch.set_num_threads(threads)
    log.close()
    return log.path


def asked(log: EventLog, name: str, room: Any, observations: Iterable[Any]) -> None:
    """Decisions on ``observations`` by any of a capability's policies, one in two by the first."""
    rng, policies = random.Random(name), list(room.POLICIES)
    for seen in observations:
        policy = rng.choice([rng.choice(policies), policies[0]])
        log.decision(name, policy, seen, room.POLICIES[policy](seen))


def questions(name: str) -> Iterator[Any]:
    """Observations that are drawn."""
    rng = random.Random(name)
    for at in range(120):
        match name:
            case "serving.engine":
                tokens = [rng.randint(0, 40) for _ in range(6)]
                yield admission.Observation(
                    5.0, rng.randint(0, 4), rng.randint(0, 3), rng.randint(50, 300), 32, rng.randint(0, 90),
                    tuple(
                        admission.Filling(some, 0, some, min(some, 20)) for some in tokens[: at % 4] if some
                    ),
                    tuple(
                        admission.Waiting(
                            100 + some, 20, 20 * (some > 0), 40 + some, rng.choice([inf, 5.01, 5.04])
                        )
                        for some in tokens[2:]
                    ),
                    TIME,
                )  # fmt: skip
            case "serving.branching":
                count = rng.randint(0, 4)
                numbers = tuple(range(count))
                yield branching.Observation(
                    0.0, 4, rng.randint(50, 400), ((16, 40),) * (at % 2), numbers,
                    tuple(rng.choice([-0.01, 0.001, 0.004, 0.1]) for _ in numbers),
                    tuple(rng.choice([0.001, 0.004, 0.02]) for _ in numbers),
                    tuple(rng.randint(1, 90) for _ in numbers), tuple(rng.randint(0, 150) for _ in numbers),
                    tuple(
                        branching.Candidate(rng.randint(0, 4), unit, rng.randint(1, 9000), rng.randint(1, 30))
                        for unit in range(1, rng.randint(3, 7))
                    ),
                    rng.randint(-1, 6), TIME, rng.choice([0.8, 1.0, 1.3]),
                    tuple(rng.random() / 4 for _ in SPANS) * (at % 3 > 0),
                    tuple(0.8 + rng.random() / 2 for _ in range(BUCKETS)) * (at % 4 > 0),
                    rng.choice([0.2, 0.9]),                    rng.choice(["token", "step"]),
                )  # fmt: skip
            case "serving.prefixcache":
                rules, known = rng.choice(list(RULES.values())), sorted(rng.sample(range(2000), 2))
                some = tuple(
                    prefixcache.Candidate(node, rng.random(), rng.random(), rng.random() * (at % 3 > 0))
                    for node in range(rng.randint(1, 5))
                )
                unit, copies = rng.choice([1, 16]), rng.choice([-1, 1, prefixcache.MANY])
                yield prefixcache.Lookup(rules, unit, 2200, known[1], known[0], copies, at % 4 > 0)
                alpha, most = rng.choice([0.0, 0.7]), 0.8 - at % 2
                yield prefixcache.Eviction(rules, alpha, 1.5, (0.1, 0.9), (0.2, most), some)
                yield prefixcache.Return(rng.random(), rng.random())
                yield prefixcache.Trials((0.0, 0.1, 0.2), tuple(rng.choice([1.0, 2.0]) for _ in range(3)))


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
        made = [one["decision"] for one in decisions]
        filled = [part for one in made for part in one["prefill"]]
        admitted = [one for part in made for one in part["admit"]]
        if (late := [one for part in made for one in part["refuse"]]) != step["refused"]:
            wrong.append(f"step {number}: refused {step['refused']}, decided {late}")
        if [one for one, _ in step.get("admitted", ())] != admitted:
            wrong.append(f"step {number}: admitted {step.get('admitted')}, decided {admitted}")
        computed = step.get("computed", [])
        if computed[: len(filled)] != filled or any(one[2] != 1 for one in computed[len(filled) :]):
            wrong.append(f"step {number}: computed {computed}, decided {filled}")
        for one in decisions:
            seen = one["observation"]
            waited |= any(part["reserve"] > seen["free"] for part in seen["waiting"]) and seen["slots"] > 0
    return wrong if waited else [*wrong, "nobody waited for memory"]


def branching_effects(events: Sequence[Event]) -> list[str]:
    """Those that were to take part were computed, and of the other candidates none."""
    wrong = []
    for number, (decisions, step) in enumerate(steps(events, "serving.branching"), 1):
        computed = {(request, unit) for request, unit, _ in step.get("computed", ())}
        for one in decisions[-1:]:
            seen, chosen = one["observation"], {tuple(unit) for unit in one["decision"]["admitted"]}
            asked = {(part["request"], part["unit"]) for part in seen["candidates"]}
            if computed & asked != chosen:
                wrong.append(f"step {number}: {computed & asked} took part, decided {chosen}")
    return wrong


def prefix_effects(events: Sequence[Event]) -> list[str]:
    """What was used, copied and evicted is what was decided."""
    wrong, looked = [], dict[int, Event]()
    lookup: Event = {}
    victims: dict[int, bool] = {}
    last = 0
    for event in events:
        match event["kind"], (event.get("observation") or {}).get("is"):
            case "decision", "Lookup":
                lookup, last = event, 0
            case "decision", "Eviction":
                last = event["decision"]["node"]
                victims[last] = True
            case "decision", "Return":
                if last:
                    victims[last] = event["decision"]["restore"]
                last = 0
            case "looked", _:
                looked[event["request"]] = event
                decided = [lookup["observation"]["usable"], *lookup["decision"].values()]
                if [event["cached"], "Keep", event["stops"], event["end"]] != [decided[0], *decided[1:]]:
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
                went = {node for node, piece in pieces.items() if _gone(piece)}
                down = {node for node in victims if pieces.get(node, {}).get("do", "").endswith(" to 1")}
                if not set(victims) <= went or any(not victims[node] for node in down):
                    wrong.append(f"{event['pieces']}, decided {victims}")
                wrong += [f"{piece}" for piece in pieces.values() if not _as_told(piece)]
                victims = {}
    return wrong


def _gone(piece: Event) -> bool:
    return piece["do"] in ("evict", "strip", "merge") or piece["do"].endswith(" to 1")


def _as_told(piece: Event) -> bool:
    """Memory has what it should after this."""
    match piece["do"]:
        case "split":
            return True
        case "make" | "kv to 0":
            return bool(piece["kv"])
        case "hold" | "state to 0":
            return bool(piece["state"])
        case "strip" | "state to 1":
            return not piece["state"]
    return not piece["kv"]


@dataclass
class Looked:
    """The twin's prefix cache: what live's said."""

    answers: dict[int, deque[tuple[int, Depths]]]
    now: float = 0.0

    def look(self, request: Request) -> tuple[int, Depths]:
        return self.answers[request.id].popleft()

    def admitted(self, number: int) -> int:
        return 0

    def read(self, request: Request) -> None: ...
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
        made: list[Any] = []
        served = serve(
            [from_plain(Request, event["request"]) for event in arrived],
            from_plain(Limits, some[0]["limits"]), from_plain(StepTime, some[0]["time"]), jump=False,
            truth=took, prefixes=Looked(looked),  # type: ignore[arg-type]
            log=lambda name, policy, seen, decision: made.append(to_plain(decision, tag=True)),  # noqa: B023
        )  # fmt: skip
        live = [event["decision"] for event in some if event["kind"] == "decision"]
        pairs += zip_longest(live, made)
        late = {number for event in some for number in event.get("refused", ()) if event["kind"] == "step"}
        left = [event["refused"] == "queue" or event["request"]["id"] in late for event in arrived]
        pairs.append((left, served.refused.tolist()))
    return pairs


def variants_questions() -> Iterator[Any]:
    """Observations that are drawn: of a variant on a CPU and one on an accelerator, cheap and dear ones."""
    rng = random.Random(3)
    for at in range(150):
        some = tuple(
            Variant(
                f"v{one}", "net", "task", hardware=rng.choice([CPU, "gpu"]), threads=rng.choice([1, 4]),
                batch=rng.choice([1, 8]), load=rng.choice([0.5, 5.0]), slope=rng.choice([0.001, 0.01]),
                intercept=rng.choice([0.0, 0.002, 0.12]), memory=rng.choice([1 << 20, 1 << 30]),
                accuracy=rng.choice([0.6, 0.7, 0.8]), price=rng.choice([1e-5, 1e-4]),
            )
            for one in range(3)
        )  # fmt: skip
        hosts = tuple(
            Host(
                f"h{one}", rng.choice([CPU, CPU, "gpu"]), 4, rng.choice([1 << 25, 3 << 30, 9 << 30]),
                rng.choice([0.01, 0.2, 0.9]), rng.choice(["", "", "net"]),
            )
            for one in range(rng.randint(0, 3))
        )  # fmt: skip
        held = tuple(
            Held(
                f"h{one}", rng.choice(["active", "active", "overloaded"]), 1, rng.choice([0.0, 30.0]),
                rng.choice([0.0, 0.0, 0.3]), 1.0, rng.randint(0, 2),
            )
            for one in range(3)
        )  # fmt: skip
        query = Query(
            at, "task", rng.choice([1, 1, 1, 9]), rng.choice([0.0, 0.65, 0.9]),
            rng.choice([0.001, 0.05, 0.3, 7.0, inf]), rng.choice([inf, inf, inf, 1e-6]), rng.random() < 0.2,
        )  # fmt: skip
        candidates = tuple(Candidate(one, held[: rng.choice([0, 0, 1, 2])]) for one in some)
        yield Asked(
            query, candidates, hosts, ("v1",) * (at % 2), rng.choice(["", "v2"]), at % 3 > 0,
            rng.choice([1, 2000]), rng.choice([0.0, 0.2]),
        )  # fmt: skip
        few = rng.randint(1, 5)
        yield Waiting(
            some[0], tuple(rng.randint(1, 2) for _ in range(few)),
            tuple(rng.choice([0.001, 0.009, 0.03, 0.2]) for _ in range(few)), rng.random() < 0.2,
            rng.randint(0, 4), 4, rng.choice([1.0, 2.0]), rng.random() < 0.2,
        )  # fmt: skip
        yield Measured(
            some[1], rng.choice(list(LEGAL)), rng.choice([0, 1, 1, 2]), rng.choice([0.0, 900.0]),
            rng.choice([0.01, 0.5]), 1.0, rng.choice([0, 3, 4000]), rng.choice([0, 0, 2]),
        )  # fmt: skip
        running = tuple(
            Running(
                one, rng.choice([1, 2]), rng.choice([0.0, 0.02, 5.0, 90.0, 2000.0]), rng.choice([0, 0, 0, 3]),
                rng.choice(["active", "active", "overloaded"]), rng.choice([0.005, 0.2, inf]), 0.6,
                rng.choice([0, 9, 19, 299]),
            )
            for one in some[: rng.randint(1, 2)]
        )  # fmt: skip
        if hosts:
            yield Load(hosts[0], running, some[2:], hosts[1:])
        yield Fleet(
            rng.choice([CPU, "gpu"]), hosts, rng.choice([0, 1]), rng.random() < 0.2, rng.choice([3, 20, 20]),
            rng.choice([0, 14, 200]), rng.choice([0, 0, 1]),
        )  # fmt: skip


def variants_recorded(folder: Path) -> Sequence[Path]:
    from support.variants import asked as queried

    log = EventLog(queried(folder))
    log.append("drawn")
    asked(log, "serving.variants", variants, variants_questions())
    log.close()
    return [log.path]


def desk(events: Sequence[Event]) -> tuple[list[Any], list[list[Any]]]:
    """What the desk decides and says is to be done if it is told, at the same times, what live's was."""
    made: list[Any] = []
    done: list[list[Any]] = []
    policy = next(event["policy"] for event in events if event["kind"] == "decision")

    def decide(seen: Any) -> Any:
        made.append(variants.POLICIES[policy](seen))
        return made[-1]

    def effects(some: Iterable[Effect]) -> None:
        for one in some:
            match one:
                case Run(group, batch):
                    done.append(["runs", group.variant.name, [each.query.id for each in batch]])
                case Fail(request, _, refused, after) if request.query.id not in left:
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
                known = [from_plain(Variant, one) for one in event["variants"]]
                there = Desk(known, decide, pinned=event["pinned"], grows=False)
                host = Hosted(name="this host", hardware=CPU, cores=event["cores"], free=event["free"])
                there.hosts[host.name] = host
                groups = {one.name: there.group(one.name, host.name) for one in known}
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
                batch = next(one for one in begun if [it.query.id for it in one] == event["requests"])
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
    return made, done


FIELDS = {
    "runs": ("variant", "requests"), "fails": ("request", "error", "after"), "loads": ("variant", "due"),
    "stops": ("variant",), "responds": ("request", "variant"),
}  # fmt: skip


def variants_effects(events: Sequence[Event]) -> list[str]:
    """Batches ran, replicas came and went, and queries were answered or refused as the desk says."""
    _, decided = desk(events)
    wrong = []
    for kind, fields in FIELDS.items():
        live = [[kind, *(event[one] for one in fields)] for event in events if event["kind"] == kind]
        said = [one for one in decided if one[0] == kind]
        wrong += [f"{one}, decided {other}" for one, other in zip_longest(live, said) if one != other]
    return wrong


def variants_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    begun = next(at for at, event in enumerate(events) if event["kind"] == "drawn")
    live = [event["decision"] for event in events[:begun] if event["kind"] == "decision"]
    return list(zip_longest(live, (to_plain(one, tag=True) for one in desk(events)[0])))


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
        "serving.engine", ENGINE + "live/loop.py", 'told.refused.append((number, "late"))', "pass", live=True
    ),
    Mutant(
        "serving.branching", "serving/branching/policy/__init__.py",
        "if seconds - base <= seen.rho * budget:", "if seconds - base <= budget:",
    ),
    Mutant(
        "serving.branching", ENGINE + "policy/scheduler.py", "branches += chosen.admitted",
        "branches += chosen.admitted[1:]", live=True,
    ),
    Mutant(
        "serving.prefixcache", CACHE + "policy/__init__.py", "found.add(seen.matched)",
        "found.add(seen.usable)",
    ),
    Mutant(
        "serving.prefixcache", ENGINE + "live/prefixes.py",
        'self._drop(node, "state")\n                    self._drop(node, "kv")', 'self._drop(node, "state")',
        live=True,
    ),
    Mutant(
        "serving.variants", VARIANTS + "policy/select.py",
        "if seconds <= left < inf or (left == inf and seen.waiting < QUEUE):", "if True:",
    ),
    Mutant(
        "serving.variants", VARIANTS + "live/service.py", "who = self.groups[request.group.variant.name]",
        "who = first", live=True,
    ),
)  # fmt: skip
