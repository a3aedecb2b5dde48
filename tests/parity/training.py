"""Training: live runs with kills, what they did, and twins that are driven by what happened to them.

A log is of live runs first. After them stand decisions on observations that are drawn here (``drawn``): they
reach the rules that a short run does not, are decided by the same `decide`, and have no effects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity
from support import quick
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


PARITY: dict[str, Parity] = {
    "training.elastic": Parity(elastic_record, elastic_effects, elastic_twin),
    "training.checkpoint": Parity(checkpoint_record, checkpoint_effects, checkpoint_twin),
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
)  # fmt: skip
