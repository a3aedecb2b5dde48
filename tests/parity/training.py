"""Training: live runs with kills, what they did, and twins that are driven by what happened to them.

A log is of live runs first. After them stand decisions on observations that are drawn here (``drawn``): they
reach the rules that a short run does not, are decided by the same `decide`, and have no effects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from parity import Event, Mutant, Parity
from support import quick
from support.ranks import run_ranks
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.capabilities import find
from windtunnel.store import eventlog
from windtunnel.training.checkpoint import policy as checkpoint
from windtunnel.training.checkpoint.model import Commit, Copy, Log, Persisted, Placement, Twins
from windtunnel.training.checkpoint.policy import pacing
from windtunnel.training.checkpoint.policy.restore import BadCopy, StoredShard, StoredStep
from windtunnel.training.checkpoint.policy.slots import slot_for
from windtunnel.training.elastic.policy import handlers, rules
from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.state import Past, Settings
from windtunnel.training.emulate import policy as emulate
from windtunnel.training.emulate.policy.groups import FamilySeen
from windtunnel.training.emulate.policy.search import name_of
from windtunnel.training.gradsync import policy as gradsync
from windtunnel.training.gradsync.model import (
    CodecCost,
    CodecPoint,
    CollectiveCost,
    Network,
    Plan,
    Profile,
    SumTime,
    Tensor,
)
from windtunnel.training.gradsync.policy.plan import price
from windtunnel.training.pipelines import policy as pipelines
from windtunnel.training.pipelines.model import Reconfiguration, Stage, Template, TemplateSet
from windtunnel.training.pipelines.policy.commit import Standing
from windtunnel.training.pipelines.policy.transfers import layers_by_host

ROOT = Path(__file__).parent.parent.parent
Pairs = list[tuple[Any, Any]]


def trained(folder: Path, *words: str | Path) -> Path:
    """The log of ``windtunnel train``, whose hosts and faults ``words`` give."""
    done = quick.windtunnel("train", "--out", folder, *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / eventlog.NAME


def drawn(folder: Path, capability: str, observations: Iterator[tuple[str, Any]]) -> Path:
    """A log of what policies, by name, decide on ``observations``."""
    room, path = find(capability, who="parity").room("policy"), folder / "drawn.jsonl"
    with closing(eventlog.EventLog(path, drawn=True)) as log:
        for policy, observation in observations:
            log.decision(capability, policy, observation, room.POLICIES[policy](observation))
    return path


def any_of(kind: type, seed: int, count: int, /, **fields: Sequence[Any]) -> Iterator[Any]:
    """``count`` of ``kind``, each field drawn from what stands in ``fields``."""
    rng = random.Random(seed)
    for _ in range(count):
        yield kind(**{name: rng.choice(values) for name, values in fields.items()})


def runs(events: Sequence[Event]) -> list[list[Event]]:
    """The live runs of a log, each from its event ``started``."""
    found: list[list[Event]] = []
    for event in events:
        if event["kind"] == "started":
            found.append([])
        if found and "drawn" not in event:
            found[-1].append(event)
    return found


def decisions(events: Sequence[Event], capability: str, *kinds: str) -> list[Event]:
    """The decisions of a capability on observations of these kinds."""
    return [
        event for event in events
        if event["kind"] == "decision" and event["capability"] == capability
        and (not kinds or event["observation"]["is"] in kinds)
    ]  # fmt: skip


# -- elastic

FAILING = """
from pathlib import Path
import torch
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer

FAILED = Path(__file__).with_suffix(".failed")

def train(job):
    state = {"x": torch.zeros(8)}
    checkpointer = PeerCheckpointer(job, copies=2, mode="blocking")
    for step in range(checkpointer.restore(state), 10):
        if step == 4 and job.rank == 1 and not FAILED.exists():
            FAILED.touch()
            raise ValueError("once")
        state["x"] += 1
        checkpointer.step(step, state)
        job.step(step)

elastic.run(train)
"""


def elastic_record(folder: Path) -> list[Path]:
    """Three hosts and two spares: two hosts are killed, the program fails by itself, a process ends, and once
    the spares are used up a host is ordered. Then a job that shrinks."""
    (folder / "train.py").write_text(FAILING)
    faults = ("kill:host=1,step=2", "exit:rank=1,step=5,status=3", "kill:host=0,step=6", "kill:host=2,step=7")
    words = [word for fault in faults for word in ("--inject", fault)]
    replaced = trained(
        folder / "replace", "--hosts", "3", "--spares", "2", "--lease", "5", *words, folder / "train.py"
    )
    (folder / "other.py").write_text(FAILING)
    shrunk = trained(
        folder / "shrink", "--hosts", "3", "--lease", "5", "--on-loss", "shrink",
        "--inject", "kill:host=1,step=2", folder / "other.py",
    )  # fmt: skip
    return [replaced, shrunk, drawn(folder, "training.elastic", elastic_drawn())]


def elastic_drawn() -> Iterator[tuple[str, rules.Observation]]:
    """Each of the six questions, some hundred times in all."""
    for one in _elastic_drawn():
        yield one.rules.on_loss if isinstance(one, rules.Change) else "replace", one


def _elastic_drawn() -> Iterator[rules.Observation]:
    chosen = [
        rules.Rules(on_loss, order, minimum, most)
        for on_loss in ("replace", "shrink", "restart", "shrink-restart")
        for order in (True, False) for minimum in (1, 3) for most in (0, 3)
    ]  # fmt: skip
    places = [(), (0, 1, 2), (0, None, 2), (None, None, 2), (3, 1, 0), (None,) * 3]
    yes, seldom = [True, False], [False, False, True]
    yield from any_of(
        rules.Change, 1, 300, rules=chosen, wanted=[3], places=places, broken=[(), (), (1,)],
        spares=[(), (7,), (6, 4), (5, 8, 9)], coming=[0, 1, 3], forced=yes, own=yes, hit=yes,
        own_failures=[0, 0, 3], fruitless=[0, 30], progress=yes, lived=[1.0, 90.0], store=[True, True, False],
        storeless=[1.0, 61.0], store_error=["", "refused"], cause=["host 1 is lost"],
    )  # fmt: skip
    waits: dict[str, Sequence[float]] = {"waited": [0.1, 5.0, 9.0], "allowed": [5.0]}
    counts: dict[str, Sequence[int]] = {"times": [1, 3, 4], "most": [3]}
    yield from any_of(rules.Doubt, 2, 60, ranks=[(1,), (0, 2)], looked=yes, **waits, **counts)
    pairs = [(), ((0, 2),), ((0, 2), (1, 2)), ((2, 0), (2, 1)), ((0, 2), (2, 0)), ((0, 1), (1, 2), (2, 0))]
    yield from any_of(
        rules.Reached, 3, 40, places=[(0, 1, 2), (2, 1, 0), (0, None, 2), (0, 1, 2, 3, 4)],
        told=[(), (0, 1), (0, 1, 2), (0, 2)], silent=pairs,
    )  # fmt: skip
    yield from any_of(
        rules.Late, 4, 80, ranks=[(), (1, 2)], speaks=[True, True, False], unstarted=[(), (2,)],
        lived=[1.0, 130.0], **waits, **counts,
    )  # fmt: skip
    yield from any_of(rules.Overdue, 5, 60, first=yes, there=[2, 3], wanted=[3], coming=[0, 1], **waits)
    errors = [
        "", "Traceback\nValueError: once", "torch.distributed.DistNetworkError: gone",
        "RuntimeError: [gloo] Connection closed by peer", "RuntimeError: shapes differ",
    ]  # fmt: skip
    yield from any_of(
        rules.Ended, 6, 120, rank=[1], status=[None, 0, 1, 1, 2], hit=seldom, doubtful=seldom, less=seldom,
        error=errors, **counts,
    )  # fmt: skip


def elastic_effects(events: Sequence[Event]) -> list[str]:
    """The generation that was formed has the decided hosts in their places, and processes arrive on these;
    as many hosts are ordered; who is fenced or blamed is lost so."""
    faults: list[str] = []
    for run in runs(events):
        due: dict[str, Any] = {}
        hosts: dict[int, list[int]] = {}
        for event in run:
            match event["kind"]:
                case "decision" if event["capability"] == "training.elastic":
                    if due:
                        faults.append(f"nothing came of {due}")
                    due = event["decision"]
                    if due["is"] in ("Keep", "Look", "Regroup") or due.get("order") == 0:
                        due = {}
                case "decided":
                    formed = event["membership"]
                    hosts[event["generation"]] = ids = [host["id"] for host in formed["hosts"]]
                    wanted = (due.get("places"), due.get("restart_all"), due.get("own_failures"))
                    if wanted != (ids, event["restart_all"], event["own_failures"]):
                        faults.append(f"generation {event['generation']} of hosts {ids} is formed for {due}")
                    due = {}
                case "ordered":
                    if event["count"] != due.get("order"):
                        faults.append(f"{event['count']} hosts are ordered for {due}")
                    due = {}
                case "lost" if event["what"] == "worker" and event["evidence"] == "exit":
                    if event["own"] != due.get("own"):
                        faults.append(f"rank {event['rank']} is lost, own {event['own']}, for {due}")
                    due = {}
                case "arrived":
                    ids = hosts[event["generation"]]
                    if event["host"] != ids[event["rank"] // run[0]["config"]["per_host"]]:
                        faults.append(f"rank {event['rank']} arrives on host {event['host']} of {ids}")
    return faults


class _Decided:
    """Effects of a `Core` without a world: what it decides is kept."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []

    def decision(self, generation: int, policy: str, observation: Any, decision: Any) -> None:
        self.decisions.append((type(observation).__name__, to_plain(decision, tag=True)))

    def send(self, *_: Any, **__: Any) -> None:
        """Nobody hears."""

    drop = record = order = strike = send


def elastic_twin(events: Sequence[Event]) -> Pairs:
    """The supervisor's `Core`, in emulated time, is told of the hosts that came and went, of processes that
    ended, and of what ranks said."""
    return [pair for run in runs(events) for pair in _elastic_twin(run)]


def _elastic_twin(run: Sequence[Event]) -> Pairs:
    config, now = run[0]["config"], float(run[0]["t"])
    settings = Settings(config["hosts"], config["per_host"], lease=config["lease"])
    effects = _Decided()
    core = Core(settings, from_plain(rules.Rules, config["rules"]), effects, 1, Past(), now)
    live = decisions(run, "training.elastic")
    for event in run[1:]:
        now = max(now, float(event["t"]))
        for host in core.hosts.live.values():
            core.hosts.renew(host, now)
        _told(core, event, now)
    expected = [(one["observation"]["is"], one["decision"]) for one in live]
    return list(zip_longest(expected, effects.decisions))


def _told(core: Core, event: Event, now: float) -> None:
    """What an event of the log says of the world, told to ``core``; time passes where live decided."""
    rank = event.get("rank")
    about = {"rank": rank, "generation": event.get("generation")}
    match event["kind"]:
        case "host.joined":
            handlers.hello(core, event["host"], {**event, "host": None}, now)
        case "store":
            core.store_up(event["address"], now)
        case "lost" if event["what"] == "host" and event["evidence"] != "cut":
            core.tick(now - 1e-3)
            core.hosts.live[event["host"]].lease_ends = now - 1e-6
            core.tick(now)
        case "lost" if event["evidence"] == "frozen" and rank not in core.lost:
            handlers.message(core, event["host"], {"op": "worker", "what": "frozen", **about}, now)
        case "grouped" | "step":
            handlers.message(core, event["host"], {**event, "op": "event"}, now)
        case "suspected" | "done":
            told = {"op": event["kind"].replace("ed", ""), **about, "error": event.get("error")}
            handlers.message(core, _host_of(core, rank), told, now)
        case "decision" if event["capability"] == "training.elastic":
            seen = event["observation"]
            if seen["is"] == "Ended":
                told = {"op": "worker", "what": "ended", "rank": seen["rank"], "generation": core.generation}
                told |= {"status": seen["status"], "error": seen["error"], "less": seen["less"]}
                handlers.message(core, _host_of(core, seen["rank"]), told, now)
                return
            if seen["is"] == "Reached" and core.round is not None:
                answers = {one: [b for a, b in seen["silent"] if a == one] for one in seen["told"]}
                core.round.told.update({one: tuple(silent) for one, silent in answers.items()})
            core.tick(now + core.settings.settle)


def _host_of(core: Core, rank: Any) -> int:
    assert core.membership is not None
    return core.membership.hosts[core.place(rank)].id


# -- checkpoint

KEPT = """
import time
import torch
import torch.distributed as dist
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer

def train(job):
    state = {{"x": torch.full(({numel},), float(job.rank))}}
    checkpointer = PeerCheckpointer(job, copies=2, {options})
    for step in range(checkpointer.restore(state), {steps}):
        while step == {stored} and not job.checkpoints()["persisted"]:
            time.sleep(0.02)
        for _ in range(2):
            time.sleep(0.02)
            dist.all_reduce(torch.ones(1 << 18))
        state["x"] += 1
        checkpointer.step(step, state)
        job.step(step)

elastic.run(train)
"""
NEWEST = "newest"


def checkpoint_record(folder: Path) -> list[Path]:
    """Hosts are killed one by one, so that steps come from memory and from peers, then two at once, so that
    one comes from storage. Two more jobs keep to a budget, and send in idle spans."""
    faults = ("kill:host=1,step=2", "kill:host=0,step=5", "kill:host=0,step=8", "kill:host=1,step=8")
    words: list[str | Path] = ["--persist", folder / "stored", "--persist-every", "2", "--spares", "4"]
    words += [word for fault in faults for word in ("--inject", fault)]
    logs = []
    for name, hosts, numel, steps, options, more in (
        ("kept", "3", 8, 11, 'mode="blocking"', words),
        ("budget", "2", 8, 30, "budget=0.01", []),
        ("idle", "2", 1 << 20, 30, 'mode="idle", profile=3, bandwidth=2e8', []),
    ):
        script = folder / f"{name}.py"
        stored = 8 if more else -1
        script.write_text(KEPT.format(numel=numel, options=options, steps=steps, stored=stored))
        logs.append(trained(folder / name, "--hosts", hosts, "--lease", "5", *more, script))
    return [*logs, drawn(folder, "training.checkpoint", checkpoint_drawn())]


def checkpoint_drawn() -> Iterator[tuple[str, checkpoint.Observation]]:
    """Slots, cadences, placements, chunks and windows; and what is there after losses, courses and faults."""
    for one in _checkpoint_drawn():
        yield NEWEST, one


def _checkpoint_drawn() -> Iterator[checkpoint.Observation]:
    held = [(-1, -1), (3, -1), (3, 4), (5, 4), (4, 6), (5, 5)]
    yield from any_of(
        checkpoint.SlotWanted, 1, 60, slots=[2], step=[4, 5], held=held, committed=[-1, 3, 4], base=[-1, 3, 4]
    )
    times = [(0.0,), (1.0,), (1.0, 1.1, 1.3), (2.0, 1.2)]
    yield from any_of(checkpoint.StepTimes, 2, 20, share=[0.01, 0.5], plain=times, saving=times)
    rooms = [0.0, 0.004, 0.05, 5.0, 900.0, None]
    yield from any_of(
        checkpoint.Sending, 3, 60, mode=["idle", "idle", "concurrent"], left=[900, 1 << 26], chunk=[1 << 20],
        bandwidth=[None, 1e6, 1e9], startup=[0.0, 0.001], room=rooms, busy=[0.0, 0.0, 0.01],
    )  # fmt: skip
    yield from any_of(
        checkpoint.Looked, 4, 60, busy=[False, False, True], looks=[1, 2, 3], idle=[0.003, 0.02, 0.2],
        here=[None, 0.01, 0.1], longest=[0.0, 0.1], always=[False, False, True], opened=[True, False],
        endless=[True, False], safety=[0.8], startup=[0.001],
    )  # fmt: skip
    for places in (4, 5, 6):
        domains = [(), tuple("aabbcc")[:places], ("a",) * places, ("a", "b")]
        yield from any_of(
            checkpoint.CopiesWanted, 5, 16, places=[places], copies=[2, 3, 9], own=[("",) * places],
            kind=["group", "ring", "mixed", "domains"], domains=domains,
        )  # fmt: skip
    rng = random.Random(6)
    for _ in range(300):
        yield _inventory(rng)


def _inventory(rng: random.Random) -> checkpoint.Inventory:
    """Copies of two ranks' shards and what they share, on three places and in storage."""
    shards, shared, density = ["rank0", "rank1"], rng.random() < 0.4, rng.choice([0.0, 0.2, 0.5])
    copies = tuple(
        Copy(place, shard, step, 2, shared, generation, rng.choice("ll" "m"), 8, rng.choice("xxx" "y"))
        for place in range(3) for step in (4, 5) for shard in [*shards, *(["shared"] if shared else [])]
        for generation in (1, 2) if rng.random() < density
    )  # fmt: skip
    whole = tuple(StoredShard(shard, 8, "x", "l") for shard in shards)
    stored = tuple(
        StoredStep(step, 2, False, 1, whole[: rng.choice([1, 2, 2])], rng.choice(["", "", "torn"]), "check")
        for step in (2, 3, 4) if rng.random() < 0.5
    )  # fmt: skip
    known = tuple(Commit(step, course, rng.random() < 0.7) for step in (4, 5) for course in (1, 2))
    log = Log(
        tuple(one for one in known if rng.random() < 0.7),
        tuple(Persisted(step, 1, "check") for step in (2, 3) if rng.random() < 0.7), rng.choice([-1, 5]),
    )  # fmt: skip
    bad = tuple(
        BadCopy(place, shard, step)
        for place in (0, None) for shard in ("", "rank1") for step in (4, 5) if rng.random() < 0.1
    )  # fmt: skip
    twins = rng.choice(
        [(), (Twins("l", (0, 0)),), (Twins("l", (0, -1)),), (Twins("l", (0, 0)), Twins("m", (0,)))]
    )
    return checkpoint.Inventory(copies, stored, bad, rng.choice([None, log, log]), rng.random() < 0.5, twins)


def checkpoint_effects(events: Sequence[Event]) -> list[str]:
    """A step lies in the slot that it was to go to; every rank went back to the planned step, and read its
    shard where that said first; the newest committed step is found with its holders; as many bytes as allowed
    are sent; the windows that the sender knows are those that were opened; saves are as far apart as is
    decided."""
    faults: list[str] = []
    for run in runs(events):
        hosts: list[int] = []
        plan: dict[str, Any] = {}
        slot: Event | None = None
        sent: Event | None = None
        holders: dict[int, list[set[int]]] = {}
        placed: dict[str, Any] = {}
        longest, every = 0.0, 1
        for event in run:
            seen, answer = event.get("observation") or {}, event.get("decision") or {}
            match event["kind"], seen.get("is"):
                case "decided", _:
                    hosts, slot, sent = [one["id"] for one in event["membership"]["hosts"]], None, None
                case "decision", "CopiesWanted":
                    placed = answer
                case "committed", _ if len(placed["holders"]) == len(hosts):
                    holders[event["step"]] = [{hosts[at] for at in row} for row in placed["holders"]]
                case "decision", "SlotWanted":
                    if slot is not None and slot["decision"]["free"]:
                        index, step = slot["decision"]["index"], slot["observation"]["step"]
                        if seen["held"][index] != step:
                            faults.append(f"step {step} was to go to slot {index}, held is {seen['held']}")
                        if seen["step"] - step < every:
                            faults.append(
                                f"step {seen['step']} is saved after {step}, {every} apart is decided"
                            )
                    slot = event
                case "decision", "StepTimes":
                    every, slot = answer["every"], None
                case "decision", "Inventory":
                    plan = answer
                    faults += _misplaced(seen, hosts, holders)
                case "restored", _:
                    faults += _read_elsewhere(event, plan, hosts)
                case "decision", "Looked":
                    longest = max(longest, answer["seconds"])
                case "decision", "Sending":
                    if sent is not None and seen["left"] < sent["observation"]["left"]:
                        went = sent["observation"]["left"] - seen["left"]
                        if went != sent["decision"]["nbytes"]:
                            faults.append(f"{went} bytes went, allowed were {sent['decision']}")
                    sent = event
                    if seen["room"] is not None and longest < seen["room"] < pacing.ENDLESS:
                        faults.append(f"a window of {seen['room']} s is open, opened were {longest} at most")
    return faults


def _misplaced(seen: dict[str, Any], hosts: list[int], holders: dict[int, list[set[int]]]) -> list[str]:
    """Shards of the newest committed step that a host was to hold, lives, and does not have."""
    newest = max(holders, default=-1)
    has = {(copy["shard"], hosts[copy["place"]]) for copy in seen["copies"] if copy["step"] == newest}
    return [
        f"host {host} was to hold rank{rank} of step {newest}"
        for rank, row in enumerate(holders.get(newest, ()))
        for host in row & set(hosts) if (f"rank{rank}", host) not in has
    ]  # fmt: skip


def _read_elsewhere(event: Event, plan: dict[str, Any], hosts: list[int]) -> list[str]:
    sources = {shard: [one["place"] for one in row] for shard, row in plan["sources"]}
    mine = hosts.index(event["host"])
    first = {shard: mine if mine in places else places[0] for shard, places in sources.items()}
    read = {shard: place for shard, place in event["read"].items() if first[shard] != place}
    if event["step"] != plan["step"] or read:
        return [f"rank {event['rank']} restored step {event['step']}, reading {read}, for {plan}"]
    return []


def checkpoint_twin(events: Sequence[Event]) -> Pairs:
    """The first job, which waits for each commit: from its memberships, commits and what is left after a
    loss, the memory that rank 0 has for its shard, what is asked of it, and the step that all go back to."""
    pairs: Pairs = []
    memory: dict[int, list[int]] = {}  # by host, the step in each slot
    hosts: list[int] = []
    holders: dict[int, list[set[int]]] = {}
    placed = Placement("", 0, ())
    committed = base = -1
    persisted: list[int] = []
    for event in runs(events)[0]:
        seen = event.get("observation") or {}
        match event["kind"], seen.get("is"):
            case "decided", _:
                hosts = [one["id"] for one in event["membership"]["hosts"]]
                committed = base = -1
            case "committed", _:
                committed = max(committed, event["step"])
                holders[event["step"]] = [{hosts[at] for at in row} for row in placed.holders]
            case "persisted", _:
                persisted.append(event["step"])
            case "decision", "CopiesWanted":
                asked = checkpoint.CopiesWanted(len(hosts), 2, "mixed", (), ("",) * len(hosts))
                found = checkpoint.decide(asked)
                assert isinstance(found, Placement)
                placed = found
                pairs.append((event["decision"], to_plain(placed, tag=True)))
            case "decision", "Inventory":
                here = [
                    copy["step"] for copy in seen["copies"] if (copy["place"], copy["shard"]) == (0, "rank0")
                ]
                held = memory.get(hosts[0], [-1, -1])
                memory[hosts[0]] = held = [step if step in here else -1 for step in held]
                last = sorted(holders)[-2:]  # others are overwritten
                whole = [step for step in last if all(row & set(hosts) for row in holders[step])]
                base = max([*persisted, *whole], default=-1)
                holders = {step: rows for step, rows in holders.items() if step <= base}
                pairs.append((event["decision"]["step"], base if base >= 0 else None))
                if base >= 0 and base not in held:
                    held[slot_for(2, base, held)] = base
            case "decision", "SlotWanted":
                held = memory.setdefault(hosts[0], [-1, -1])
                asked_slot = checkpoint.SlotWanted(2, seen["step"], tuple(held), committed, base)
                slot = checkpoint.decide(asked_slot)
                assert isinstance(slot, checkpoint.Slot)
                pairs.append((event["decision"], to_plain(slot, tag=True)))
                held[slot.index] = seen["step"]
    return pairs


# -- pipelines


def pipelines_record(folder: Path) -> list[Path]:
    """Of five hosts two are killed, one after the other, and those that are left go on."""
    words = ("--on-loss", "shrink", "--inject", "kill:host=1,step=2", "--inject", "kill:host=0,step=4")
    log = trained(folder / "run", "--hosts", "5", *words, "examples/train_pipeline.py", "--steps", "6")
    return [log, drawn(folder, "training.pipelines", pipelines_drawn())]


def pipelines_drawn() -> Iterator[tuple[str, pipelines.Observation]]:
    """What hosts may say of a step in doubt; then losses and joins, few hosts and many, by both policies."""
    rng = random.Random(1)
    for _ in range(60):
        standings = {
            rank: Standing(
                rank, rng.choice([1, 1, 2]), {layer: rng.choice([3, 3, 4]) for layer in range(rank % 3)},
                {0: 8}, rng.choice([None, 3]), rng.random() < 0.2,
            )
            for rank in range(3)
        }  # fmt: skip
        yield "search", pipelines.InDoubt(standings, 3)
    for _ in range(200):
        n0, count = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5])
        made = tuple(_template(rng, n0 + n) for n in range(count))
        templates, hosts = TemplateSet(n0, rng.choice([1, 2]), made, "drawn"), rng.choice([4, 7, 13, 90, 90])
        first = pipelines.HostsChanged(templates, None, (*range(hosts),), 96, (1.0,) * 8)
        before = pipelines.decide(first)
        assert isinstance(before, Reconfiguration)
        left, stays = list(range(hosts)), rng.choice([0.1, 0.4, 0.8, 1.0])
        present = (
            tuple(host for host in left if rng.random() < stays) + (200, 201, 202)[: rng.choice([0, 0, 1, 3])]
        )
        if present:
            yield rng.choice(["search", "local"]), replace(
                first, before=rng.choice([before.layout] * 5 + [None]), present=present,
                microbatches=rng.choice([96, 96, len(present) // 4 or 1]), layer_bytes=(1.0, 3.0) * 4,
                reduce_seconds=rng.choice([0.0, 2.0]), seconds_per_byte=rng.choice([0.0, 0.1]),
            )  # fmt: skip


def _template(rng: random.Random, hosts: int) -> Template:
    """Stages for eight layers, one a host, of any time."""
    cuts = [8 * host // hosts for host in range(hosts + 1)]
    stages = [Stage(*cut, 1, float(rng.randint(1, 40))) for cut in pairwise(cuts)]
    return Template(hosts, tuple(stages), (*range(hosts),), 1.0, 4 * hosts)


def pipelines_effects(events: Sequence[Event]) -> list[str]:
    """The decided layout is entered, each host has the layers of its place in it, and the version is the
    one that was settled, the step in doubt applied."""
    faults: list[str] = []
    for run in runs(events):
        settled: dict[str, Any] = {}
        layout: dict[str, Any] = {}
        needed: dict[int, list[int]] = {}
        for event in run:
            seen = event.get("observation") or {}
            match event["kind"], seen.get("is"):
                case "decision", "InDoubt":
                    settled = event["decision"]
                case "decision", "HostsChanged":
                    layout = event["decision"]
                    templates = from_plain(TemplateSet, seen["templates"])
                    needed = {
                        host: sorted(layers)
                        for row in layout["layout"]["pipelines"]
                        for host, layers in zip(row, layers_by_host(templates.of(len(row))), strict=True)
                    }
                case "layout", _:
                    wanted = layout["layout"]
                    for name, value in (*wanted.items(), ("how", layout["how"])):
                        if name != "is" and event[name] != value:
                            faults.append(f"{name} {event[name]} is entered for {layout}")
                case "restored", _:
                    if event["layers"] != needed.get(event["host"], []):
                        faults.append(f"host {event['host']} has layers {event['layers']}, not {needed}")
                    if event["step"] != (settled["version"] or 0):
                        faults.append(f"host {event['host']} goes on at {event['step']}, not as in {settled}")
    return faults


# -- gradsync

SLOW = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from windtunnel.store.eventlog import EventLog
from windtunnel.training import gradsync
from windtunnel.training.gradsync.policy import PATIENCE, PAUSE, Wanted, decide
from windtunnel.training.gradsync.policy.options import paced

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)))
batch = torch.randn(2, 512)

def step():
    ddp(batch).square().mean().backward()

profile = paced(gradsync.profile(ddp, step, codecs=("fp16",)), 1000.0)
wanted = Wanted(profile)
plan = decide(wanted)
log = EventLog(Path(sys.argv[1])) if dist.get_rank() == 0 else None
if log is not None:
    log.append("started")
    log.decision("training.gradsync", "search", wanted, plan)
handle = gradsync.apply(ddp, plan, profile=profile, event=log and log.append, check_every=0)
for _ in range(2):
    for _ in range(PAUSE + PATIENCE):
        step()
    handle.check()
    handle.check()
handle.close()
dist.destroy_process_group()
"""


def gradsync_record(folder: Path) -> list[Path]:
    """Two ranks run a plan for a network a thousand times as slow as theirs, until that is noticed."""
    (folder / "slow.py").write_text(SLOW)
    log = folder / "live.jsonl"
    done = run_ranks([folder / "slow.py", log], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    return [log, drawn(folder, "training.gradsync", gradsync_drawn())]


SHAPES = (87, 107, 193, 516, 735, 774, 880, 972)  # of jobs and networks that reach every rule of a plan


def gradsync_drawn() -> Iterator[tuple[str, gradsync.Observation]]:
    """Jobs of dense and sparse gradients on networks of all shapes, drifts, and plans that are made anew."""
    plans = []
    for seed in SHAPES:
        rng = random.Random(seed)
        wanted = gradsync.Wanted(_profile(rng), rng.choice([(), ("fp16",)]), seed)
        plan = gradsync.decide(wanted)
        assert isinstance(plan, Plan)
        plans.append(plan)
        yield "search", wanted
    drifts = any_of(
        gradsync.Drift, 2, 40, predicted=[0.0, 1.0], measured=[(1.0,) * 4, (1.0,) * 6, (2.0,) * 6, (1.0, 0.7) * 4],
        since=[3, 20, 40], pause=[20, 40],
    )  # fmt: skip
    renewed = any_of(
        gradsync.Renewed, 3, 12, plan=plans[:2], made=plans[:2], expected=[0.0, 1e-9, 9.0],
        measured=[0.0, 9.0], pause=[20],
    )  # fmt: skip
    yield from (("search", one) for one in (*drifts, *renewed))


def _profile(rng: random.Random) -> Profile:
    hosts, each = rng.choice([(1, 4), (4, 1), (3, 2), (1, 1)])
    tensors = [
        Tensor(f"p{n}", rng.choice([64, 1 << 16, 1 << 22]), 1e-4) for n in range(rng.choice([1, 3, 5]))
    ]
    for n in range(rng.choice([0, 0, 1])):
        growth = rng.choice([(), (1.5,), (1.5, 2.0, 3.0)])
        table = Tensor(f"t{n}", 1 << 20, 1e-4, "float32", 64, rng.choice([0.0, 0.01, 0.5]), growth, 1.5)
        tensors.insert(rng.randint(0, len(tensors)), table)
    rate, error = 10 ** rng.uniform(8, 11), rng.choice([0.0, 0.1, 0.5])
    calls = [
        CollectiveCost(scope, kind, 1e-5, (2.0 if scope == "between" else 1.0) / rate, error)
        for scope in ("flat", "inside", "between")
        for kind in ("allreduce", "reduce_scatter", "allgather", "alltoall")
    ]
    codecs = [
        CodecCost(name, device, tuple(CodecPoint(n, 1e-5 + n * cost, n * cost, n * cost, int(4 * n * ratio)) for n in
                  (1 << 10, 1 << 20)), summable, sums=2 if name.startswith("power") else 1)
        for name, device, ratio, cost, summable in (
            ("fp16", "device", 0.5, 1e-11, True), ("topk:0.01", "host", 0.02, 2e-10, False),
            ("topk:0.01", "device", 0.02, 1e-10, False), ("powersgd:1", "device", 0.01, 1e-10, True),
        )
    ]  # fmt: skip
    sums = tuple(
        SumTime(one.name, scheme, rng.random()) for one in tensors if one.width for scheme in ("zen", "dense")
    )
    network = Network(hosts, each, tuple(calls), rng.choice([(), sums]))
    return Profile(tuple(tensors), tuple(codecs), network, 1e-3, handing=rng.choice([0.0, 1e-5]))


def gradsync_effects(events: Sequence[Event]) -> list[str]:
    """The plan that runs is the one that was decided last, group by group."""
    faults: list[str] = []
    for run in runs(events):
        due: Plan | None = None
        first = True
        for event in run:
            seen = event.get("observation") or {}
            match event["kind"], seen.get("is"):
                case "decision", "Wanted" if first:
                    first = False
                    due = from_plain(Plan, event["decision"])
                case "decision", "Renewed" if not event["decision"]["keep"]:
                    if due is not None:
                        faults.append(f"no plan of digest {due.digest()} ran")
                    due = from_plain(Plan, seen["made"])
                case "plan", _:
                    words = [] if due is None else [one.option.words() for one in due.groups]
                    if due is None or (event["digest"], event["runs"]) != (due.digest(), words):
                        faults.append(f"{event['runs']} runs, decided is {words}")
                    due = None
                case "decision", "Drift" if due is not None:
                    faults.append(f"no plan of digest {due.digest()} ran")
                    due = None
    return faults


def gradsync_twin(events: Sequence[Event]) -> Pairs:
    """The checks of a handle, told of profiles and of times that were measured."""
    pairs: Pairs = []
    plan: Plan | None = None
    for run in runs(events):
        pause = gradsync.PAUSE
        for event in run:
            seen = event.get("observation") or {}
            asked: gradsync.Observation
            match event["kind"], seen.get("is"):
                case "decision", "Wanted":
                    profile = from_plain(Profile, seen["profile"])
                    asked = gradsync.Wanted(profile, tuple(seen["codecs"]), seen["seed"])
                case "decision", "Drift":
                    assert plan is not None
                    asked = gradsync.Drift(
                        plan.forecasts[0].seconds, tuple(seen["measured"]), seen["since"], pause
                    )
                case "decision", "Renewed":
                    assert plan is not None
                    expected = price(plan, profile)
                    asked = gradsync.Renewed(plan, made, expected, seen["measured"], pause)
                case _:
                    continue
            decision = gradsync.decide(asked)
            pairs.append((event["decision"], to_plain(decision, tag=True)))
            if isinstance(decision, Plan):
                made = decision
                plan = plan or made
            elif isinstance(asked, gradsync.Renewed):
                pause = decision.pause
                if not decision.keep or made.digest() == asked.plan.digest():
                    plan = made
    return pairs


# -- emulate

EMULATED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
layer = torch.nn.Linear(64, 64, device=torch.device("cuda", rank % torch.cuda.device_count()))
for _ in range(3):
    layer(torch.ones(4, 64, device=layer.weight.device)).sum().backward()
    if rank == 5:
        print("five")
    dist.all_reduce(layer.weight.grad)
    layer.weight.grad = None
"""


def emulate_record(folder: Path) -> list[Path]:
    """A script on sixteen ranks, whose condition on one of them has to be checked."""
    (folder / "train.py").write_text(EMULATED)
    with pytest.MonkeyPatch.context() as patch, quick.captures():
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        run = wt.emulate(folder / "train.py", cluster="h100-sxm:2x8", report=False)
    return [run.directory / eventlog.NAME, drawn(folder, "training.emulate", emulate_drawn())]


MESHES: dict[str, tuple[tuple[str, int, int], ...]] = {
    # name, size and stride of each family
    "data": (("dp", 16, 1),), "pipeline": (("pp", 4, 4), ("tp", 4, 1)), "ring": (("cp", 8, 1), ("dp", 2, 8)),
    "deep": (("pp", 16, 2), ("tp", 2, 1)), "half": (("dp", 8, 1),),
}  # fmt: skip
CONDITIONS = (
    "", "v0 % 2 == 0", "v0 in (1, 3)", "v0 in {1, 5}", "{0: 1, 3: 2}.get(v0, 0)", "not v0 or v0 > 3 and v0 < 6",
    "0 < v0 < 9", "1 if v0 == 2 else -v0", "(0, 1, 2, 3)[v0 % 4]", "v0 in range(3, 5)", "hash(v0) == 3",
    "max(v0, 4) == 4", "v0 / 0", "1 << v0 * 300", "v0 * 'ab' == 'abab'", "range(1 << 20) == v0", "hash('a')",
    "v0.real", "(1 << 300) + v0", "unknown(v0)", "{v0: 1}", "v0.get(1)", "1 << 999",
)  # fmt: skip


def emulate_drawn() -> Iterator[tuple[str, emulate.Observation]]:
    """Worlds that are known, asked about until all of their ranks are."""
    rng = random.Random(1)
    for _ in range(120):
        name = rng.choice(list(MESHES))
        world = 16 if name != "deep" else 32
        families = [FamilySeen(label, size, True, stride) for label, size, stride in MESHES[name]]
        if name == "half":
            families = [FamilySeen("dp", 8, True, 0, tuple(range(8)) * 2)]
        odd = rng.choice([(), (0,), (world - 1,), (world // 2,), (5, 6), tuple(range(9, world))])
        kind = {rank: (rank in odd) + 2 * (rank // 4 if name == "pipeline" else 0) for rank in range(world)}
        if name == "deep":
            kind = {
                rank: rank // 2 if rank < world - 2 or rng.random() < 0.5 else 99 for rank in range(world)
            }
        seen = emulate.Observation(
            world, rng.choice(["auto"] * 6 + ["all", " all", "0,3-5"]), rng.choice([8, 256]),
            peers={"pipeline": (4,), "ring": (1, 7), "deep": (2,)}.get(name, ()), families=tuple(families),
            checks=rng.choice([0, 4, 16]), devices_per_host=8,
        )  # fmt: skip
        conditions = tuple(
            emulate.Condition(f"x.py:{n}", rng.choice(CONDITIONS), (0,), rng.random() < 0.3)
            for n in range(rng.choice([0, 1, 3]))
        )  # fmt: skip
        hidden = rng.choice([(), (7,), (7, 9)])  # call something else, where nobody has looked
        yield from _asked(seen, kind, conditions, hidden, rng.random() < 0.3)


def _asked(
    seen: emulate.Observation, kind: dict[int, int], conditions: tuple[emulate.Condition, ...],
    hidden: tuple[int, ...], refuses: bool,
) -> Iterator[tuple[str, emulate.Observation]]:  # fmt: skip
    policy = name_of(seen.ranks)
    classes: dict[int, int] = {}
    while True:
        yield policy, seen
        answer = emulate.POLICIES[policy](seen)
        if isinstance(answer, emulate.Known):
            return
        if isinstance(answer, emulate.Capture):
            for rank in answer.ranks:
                classes.setdefault(kind[rank] + 1000 * (rank in hidden), len(classes))
            captured = {
                rank: classes[kind[rank] + 1000 * (rank in hidden)]
                for rank in (*seen.captured, *answer.ranks)
            }
            calls = tuple(number for number in range(len(classes)))
            source = emulate.Source("x.py:1", {rank: rank for rank in captured})
            seen = replace(seen, captured=captured, calls=calls, conditions=conditions, sources=(source,))
        else:
            outlines = {
                rank: -1 if refuses else classes.get(kind[rank] + 1000 * (rank in hidden), 50 + rank // 8)
                for rank in answer.ranks
            }
            seen = replace(seen, checked={**seen.checked, **outlines})


def emulate_effects(events: Sequence[Event]) -> list[str]:
    """The ranks that were wanted, and no others, are run next."""
    faults: list[str] = []
    due: list[int] | None = None
    for event in events:
        if "drawn" in event:
            break
        if event["kind"] == "decision":
            if due:
                faults.append(f"ranks {due} were not run")
            due = sorted(event["decision"].get("ranks", ()))
        elif event["kind"] == "run":
            if event["ranks"] != due:
                faults.append(f"ranks {event['ranks']} were run, wanted are {due}")
            due = None
    return faults


PARITY: dict[str, Parity] = {
    "training.elastic": Parity(elastic_record, elastic_effects, elastic_twin),
    "training.checkpoint": Parity(checkpoint_record, checkpoint_effects, checkpoint_twin),
    "training.pipelines": Parity(pipelines_record, pipelines_effects),
    "training.gradsync": Parity(gradsync_record, gradsync_effects, gradsync_twin),
    "training.emulate": Parity(
        emulate_record,
        emulate_effects,
        beyond=("stands[rank] = other", "return np.arange(observation.world_size)"),
    ),
}
MUTANTS = (
    Mutant(
        "training.elastic", "training/elastic/policy/rules.py",
        "order = max(0, missing - now.coming)", "order = missing",
    ),
    Mutant(
        "training.elastic", "training/elastic/policy/rules.py",
        "spares = iter(now.spares)", "spares = iter(now.spares[::-1])",
    ),
    Mutant("training.elastic", "training/elastic/policy/rules.py", "if missing <= 0:", "if missing < 0:"),
    Mutant(
        "training.elastic", "training/elastic/policy/core.py",
        "member for host in decision.places),", "member for host in decision.places[::-1]),", live=True,
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/slots.py",
        "kept >= step or kept < committed", "kept >= step or kept <= committed",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/restore.py",
        "k.world, k.has_shared), reverse=True)", "k.world, k.has_shared))",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/pacing.py",
        "left = now.safety * (now.here or 0.0)", "left = (now.here or 0.0)",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/live/checkpointer.py",
        "return slot.index\n", "return (slot.index + 1) % self.settings.slots\n", live=True,
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/live/restore.py",
        "for source in list(self._sources[shard]):", "for source in self._sources[shard][::-1]:", live=True,
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/live/memory/owner.py",
        "placement.holders[place][1:]", "placement.holders[(place + 1) % len(hosts)][1:]", live=True,
    ),
    Mutant(
        "training.pipelines", "training/pipelines/policy/commit.py",
        "if has == version:", "if has != version:",
    ),
    Mutant(
        "training.pipelines", "training/pipelines/policy/reconfigure.py",
        "if len(giver) > n0:", "if len(giver) > n0 + 1:",
    ),
    Mutant(
        "training.pipelines", "training/pipelines/live/entry.py",
        "return found.layout, found.how",
        "return Layout(found.layout.pipelines[::-1], found.layout.microbatches[::-1]), found.how", live=True,
    ),
    Mutant(
        "training.gradsync", "training/gradsync/policy/__init__.py",
        "keep = low <= 1 + TOLERATED and high >= 1 - TOLERATED", "keep = True",
    ),
    Mutant(
        "training.gradsync", "training/gradsync/live/hook.py",
        "self.plan, self._executor, ddp = plan, None, self.ddp",
        "plan = self.plan; self._executor, ddp = None, self.ddp", live=True,
    ),
    Mutant("training.emulate", "training/emulate/policy/search.py", "return Capture((0,),", "return Capture((1,),"),
    Mutant(
        "training.emulate", "training/emulate/policy/checks.py",
        "if wanted := _first_of_each(cases, run)[: max(room, 0)]:", "if wanted := _first_of_each(cases, run)[:1]:",
    ),
)  # fmt: skip
