"""Training: live runs with kills, what they did, and twins that are driven by what happened to them.

A log is of live runs first. After them stand decisions on observations that are drawn (`parity.draws`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from parity import Event, Mutant, Parity, drawn
from parity.draws import (
    checkpoint_drawn,
    elastic_drawn,
    emulate_drawn,
    gradsync_drawn,
    pipelines_drawn,
)
from parity.programs import EMULATED, FAILING, KEPT, SLOW
from support import quick
from support.ranks import run_ranks
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.store import eventlog
from windtunnel.training.checkpoint import policy as checkpoint
from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy import pacing
from windtunnel.training.checkpoint.policy.slots import slot_for
from windtunnel.training.elastic.policy import handlers, rules
from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.state import LoggedState, SupervisorSettings
from windtunnel.training.gradsync import policy as gradsync
from windtunnel.training.gradsync.model import (
    SyncPlan,
    SyncProfile,
)
from windtunnel.training.pipelines.model import TemplateSet
from windtunnel.training.pipelines.policy.reconfigure import layers_by_host

ROOT = Path(__file__).parent.parent.parent
Pairs = list[tuple[Any, Any]]


def trained(folder: Path, *words: str | Path) -> Path:
    """The log of ``windtunnel train``, whose hosts and faults ``words`` give."""
    done = quick.windtunnel("train", "--out", folder, *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / eventlog.NAME


def runs(events: Sequence[Event]) -> list[list[Event]]:
    """The live runs of a log, each from its event ``started``."""
    by_run: list[list[Event]] = []
    for event in events:
        if event["kind"] == "started":
            by_run.append([])
        if by_run and "drawn" not in event:
            by_run[-1].append(event)
    return by_run


def decisions(events: Sequence[Event], capability: str, *kinds: str) -> list[Event]:
    """The decisions of a capability on observations of these kinds."""
    return [
        event for event in events
        if event["kind"] == "decision" and event["capability"] == capability
        and (not kinds or event["observation"]["is"] in kinds)
    ]  # fmt: skip


# -- elastic


def elastic_record(folder: Path) -> list[Path]:
    """Three hosts and two spares: two hosts are killed, the program fails by itself, a process ends, and once
    the spares are used up a host is ordered. Then a job that shrinks."""
    (folder / "train.py").write_text(FAILING)
    faults = ("kill:host=1,step=2", "raise:rank=1,step=5", "kill:host=0,step=6", "kill:host=2,step=7")
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

    drop = record = order = kill_launcher = send


def elastic_twin(events: Sequence[Event]) -> Pairs:
    """The supervisor's `Core`, in emulated time, is told of the hosts that came and went, of processes that
    ended, and of what ranks said."""
    return [pair for run in runs(events) for pair in _elastic_twin(run)]


def _elastic_twin(run: Sequence[Event]) -> Pairs:
    config, now = run[0]["config"], float(run[0]["t"])
    settings = SupervisorSettings(config["hosts"], config["per_host"], lease=config["lease"])
    effects = _Decided()
    live = decisions(run, "training.elastic")
    chosen = next(event["observation"]["rules"] for event in live if event["observation"]["is"] == "Change")
    core = Core(settings, from_plain(rules.Rules, chosen), effects, 1, LoggedState(), now)
    for event in run[1:]:
        now = max(now, float(event["t"]))
        for host in core.hosts.live.values():
            core.hosts.renew(host, now)
        _feed(core, event, now)
    expected = [(event["observation"]["is"], event["decision"]) for event in live]
    return list(zip_longest(expected, effects.decisions))


def _feed(core: Core, event: Event, now: float) -> None:
    """What an event of the log says of the world, told to ``core``; time passes where live decided."""
    rank = event.get("rank")
    about = {"rank": rank, "generation": event.get("generation")}
    match event["kind"]:
        case "host.joined":
            handlers.hello(core, event["host"], {**event, "host": None}, now)
        case "lost" if event["what"] == "host" and event["evidence"] != "cut":
            core.tick(now - 1e-3)
            core.hosts.leases.last_signs[event["host"]] = -math.inf
            core.tick(now)
        case "lost" if event["evidence"] == "frozen" and rank not in core.lost:
            handlers.message(core, event["host"], {"op": "worker", "what": "frozen", **about}, now)
        case "grouped" | "step":
            handlers.message(core, event["host"], {**event, "op": "event"}, now)
        case "suspected" | "done":
            message = {"op": event["kind"].replace("ed", ""), **about, "error": event.get("error")}
            handlers.message(core, _host_of(core, rank), message, now)
        case "decision" if event["capability"] == "training.elastic":
            observation = event["observation"]
            if observation["is"] == "Ended":
                message = {
                    "op": "worker",
                    "what": "ended",
                    "rank": observation["rank"],
                    "generation": core.generation,
                }
                message |= {
                    "status": observation["status"],
                    "error": observation["error"],
                    "less": observation["less"],
                }
                handlers.message(core, _host_of(core, observation["rank"]), message, now)
                return
            if observation["is"] == "Reached" and core.round is not None:
                answers = {
                    host: [b for a, b in observation["silent"] if a == host]
                    for host in observation["answered"]
                }
                core.round.answers.update({host: tuple(silent) for host, silent in answers.items()})
            core.tick(now + core.settings.settle)


def _host_of(core: Core, rank: Any) -> int:
    assert core.membership is not None
    return core.membership.hosts[core.place(rank)].id


# -- checkpoint


def checkpoint_record(folder: Path) -> list[Path]:
    """Hosts are killed one by one, so that steps come from memory and from peers, then two at once, so that
    one comes from storage. One more job sends in idle spans."""
    faults = ("kill:host=1,step=2", "kill:host=0,step=5", "kill:host=0,step=8", "kill:host=1,step=8")
    words: list[str | Path] = ["--persist", folder / "stored", "--persist-every", "2", "--spares", "4"]
    words += [word for fault in faults for word in ("--inject", fault)]
    logs = []
    for name, hosts, numel, steps, options, more in (
        ("kept", "3", 8, 11, 'mode="blocking"', words),
        ("idle", "2", 1 << 20, 30, 'mode="idle", profile=3, bandwidth=2e8', []),
    ):
        script = folder / f"{name}.py"
        stored = 8 if more else -1
        script.write_text(KEPT.format(numel=numel, options=options, steps=steps, stored=stored))
        logs.append(trained(folder / name, "--hosts", hosts, "--lease", "5", *more, script))
    return [*logs, drawn(folder, "training.checkpoint", checkpoint_drawn())]


def checkpoint_effects(events: Sequence[Event]) -> list[str]:
    """A step lies in the slot that it was to go to; every rank went back to the planned step, and read its
    shard where that said first; the newest committed step is found with its holders; as many bytes as allowed
    are sent; the windows that the sender knows are those that were opened; saves are as far apart as is
    decided; what is owed to storage is wanted there."""
    faults: list[str] = []
    for run in runs(events):
        hosts: list[int] = []
        plan: dict[str, Any] = {}
        slot: Event | None = None
        sent: Event | None = None
        holders: dict[int, list[set[int]]] = {}
        placed: dict[str, Any] = {}
        longest, every = 0.0, 1
        owed = -1
        for event in run:
            observation, answer = event.get("observation") or {}, event.get("decision") or {}
            match event["kind"], observation.get("is"):
                case "decided", _:
                    hosts, slot, sent = [host["id"] for host in event["membership"]["hosts"]], None, None
                case "decision", "CopiesWanted":
                    placed = answer
                case "committed", _ if len(placed["holders"]) == len(hosts):
                    holders[event["step"]] = [{hosts[at] for at in row} for row in placed["holders"]]
                case "decision", "SlotWanted":
                    if slot is not None and slot["decision"]["free"]:
                        index, step = slot["decision"]["index"], slot["observation"]["step"]
                        if observation["slot_steps"][index] != step:
                            faults.append(
                                f"step {step} was to go to slot {index}, held is {observation['slot_steps']}"
                            )
                        if observation["step"] - step < every:
                            faults.append(
                                f"step {observation['step']} is saved after {step}, {every} apart is decided"
                            )
                    slot = event
                case "decision", "Profiles":
                    every, slot = answer["every"], None
                case "decision", "Inventory":
                    plan = answer
                    owed = plan["step"] if plan.get("store") else -1
                    faults += _misplaced(observation, hosts, holders)
                case "restored", _:
                    faults += _read_elsewhere(event, plan, hosts)
                case "storage.wanted", _ if event["step"] == owed:
                    owed = -1
                case "step" | "finished", _ if owed >= 0:
                    faults.append(f"step {owed} was to go to storage when the job went on from it")
                    owed = -1
                case "decision", "NetworkSample":
                    longest = max(longest, answer["seconds"])
                case "decision", "Sending":
                    if sent is not None and observation["left"] < sent["observation"]["left"]:
                        went = sent["observation"]["left"] - observation["left"]
                        if went != sent["decision"]["nbytes"]:
                            faults.append(f"{went} bytes went, allowed were {sent['decision']}")
                    sent = event
                    if observation["room"] is not None and longest < observation["room"] < pacing.ENDLESS:
                        faults.append(
                            f"a window of {observation['room']} s is open, opened were {longest} at most"
                        )
    return faults


def _misplaced(
    observation: dict[str, Any], hosts: list[int], holders: dict[int, list[set[int]]]
) -> list[str]:
    """Shards of the newest committed step that a host was to hold, lives, and does not have."""
    newest = max(holders, default=-1)
    has = {
        (copy["shard"]["name"], hosts[copy["place"]])
        for copy in observation["copies"] if copy["shard"]["step"] == newest
    }  # fmt: skip
    return [
        f"host {host} was to hold rank{rank} of step {newest}"
        for rank, row in enumerate(holders.get(newest, ()))
        for host in row & set(hosts) if (f"rank{rank}", host) not in has
    ]  # fmt: skip


def _read_elsewhere(event: Event, plan: dict[str, Any], hosts: list[int]) -> list[str]:
    sources = {row[0]["shard"]["name"]: [copy["place"] for copy in row] for row in plan["sources"]}
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
        observation = event.get("observation") or {}
        match event["kind"], observation.get("is"):
            case "decided", _:
                hosts = [host["id"] for host in event["membership"]["hosts"]]
                committed = base = -1
            case "committed", _:
                committed = max(committed, event["step"])
                holders[event["step"]] = [{hosts[at] for at in row} for row in placed.holders]
            case "persisted", _:
                persisted.append(event["step"])
            case "decision", "CopiesWanted":
                asked = checkpoint.CopiesWanted(len(hosts), 2, "mixed", (), ("",) * len(hosts))
                placement = checkpoint.decide(asked)
                assert isinstance(placement, Placement)
                placed = placement
                pairs.append((event["decision"], to_plain(placed, tag=True)))
            case "decision", "Inventory":
                here = [
                    copy["shard"]["step"]
                    for copy in observation["copies"]
                    if (copy["place"], copy["shard"]["name"]) == (0, "rank0")
                ]
                held = memory.get(hosts[0], [-1, -1])
                memory[hosts[0]] = held = [step if step in here else -1 for step in held]
                last = sorted(holders)[-2:]  # others are overwritten
                whole = [step for step in last if all(row & set(hosts) for row in holders[step])]
                base = max([*persisted, *whole], default=-1)
                holders = {step: rows for step, rows in holders.items() if step <= base}
                pairs.append((event["decision"]["step"], base if base >= 0 else None))
                if base >= 0 and base not in held:
                    held[slot_for(base, held)] = base
            case "decision", "SlotWanted":
                held = memory.setdefault(hosts[0], [-1, -1])
                asked_slot = checkpoint.SlotWanted(observation["step"], tuple(held), committed, base)
                slot = checkpoint.decide(asked_slot)
                assert isinstance(slot, checkpoint.Slot)
                pairs.append((event["decision"], to_plain(slot, tag=True)))
                held[slot.index] = observation["step"]
    return pairs


# -- pipelines


def pipelines_record(folder: Path) -> list[Path]:
    """Of five hosts two are killed, one after the other, and those that are left go on."""
    words = ("--on-loss", "shrink", "--inject", "kill:host=1,step=2", "--inject", "kill:host=0,step=4")
    log = trained(folder / "run", "--hosts", "5", *words, "examples/train_pipeline.py", "--steps", "6")
    return [log, drawn(folder, "training.pipelines", pipelines_drawn())]


def pipelines_effects(events: Sequence[Event]) -> list[str]:
    """The decided layout is entered, each host has the layers of its place in it, and the version is the
    one that was settled, the step in doubt applied."""
    faults: list[str] = []
    for run in runs(events):
        settled: dict[str, Any] = {}
        layout: dict[str, Any] = {}
        needed: dict[int, list[int]] = {}
        for event in run:
            observation = event.get("observation") or {}
            match event["kind"], observation.get("is"):
                case "decision", "InDoubt":
                    settled = event["decision"]
                case "decision", "HostsChanged":
                    layout = event["decision"]
                    templates = from_plain(TemplateSet, observation["templates"])
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


def gradsync_record(folder: Path) -> list[Path]:
    """Two ranks run a plan for a network of 1 MB/s, on which a codec pays."""
    (folder / "slow.py").write_text(SLOW)
    log = folder / "live.jsonl"
    done = run_ranks([folder / "slow.py", log], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    return [log, drawn(folder, "training.gradsync", gradsync_drawn())]


def gradsync_effects(events: Sequence[Event]) -> list[str]:
    """The plan that runs is the one that was decided, group by group."""
    faults: list[str] = []
    for run in runs(events):
        if not any(event["kind"] == "plan" for event in run):
            continue  # drawn, and run by nobody
        words: list[str] = []
        for event in run:
            if event["kind"] == "decision":
                decision = from_plain(SyncPlan, event["decision"])
                words = [decision.digest(), *(group.option.words() for group in decision.groups)]
            elif event["kind"] == "plan" and [event["digest"], *event["runs"]] != words:
                faults.append(f"{event['runs']} runs, decided is {words[1:]}")
    return faults


def gradsync_twin(events: Sequence[Event]) -> Pairs:
    """The plans for the profiles that were measured."""
    pairs: Pairs = []
    for run in runs(events):
        for event in run:
            if event["kind"] != "decision":
                continue
            observation = event["observation"]
            request = gradsync.PlanRequest(
                from_plain(SyncProfile, observation["profile"]), tuple(observation["codecs"]),
                observation["seed"], observation["steps"], observation["lossy"],
            )  # fmt: skip
            pairs.append((event["decision"], to_plain(gradsync.decide(request), tag=True)))
    return pairs


# -- emulate


def emulate_record(folder: Path) -> list[Path]:
    """A script on sixteen ranks, whose condition on one of them has to be checked."""
    (folder / "train.py").write_text(EMULATED)
    with pytest.MonkeyPatch.context() as patch, quick.captures():
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        run = wt.emulate(folder / "train.py", cluster="h100-sxm:2x8", report=False)
    return [run.directory / eventlog.NAME, drawn(folder, "training.emulate", emulate_drawn())]


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
        "slot_step >= step or slot_step < committed", "slot_step >= step or slot_step <= committed",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/restore.py",
        "*k[1:]), reverse=True)", "*k[1:]))",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/restore.py",
        "0 <= log.due <= step", "0 <= log.due < step",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/pacing.py",
        "left = now.safety * (now.here or 0.0)", "left = (now.here or 0.0)",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/policy/pacing.py",
        "Spread(max(steps))", "Spread(min(steps))",
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/live/checkpointer.py",
        "return slot.index\n", "return (slot.index + 1) % 2\n", live=True,
    ),
    Mutant(
        "training.checkpoint", "training/checkpoint/live/restore.py",
        "for copy in list(self._sources[name]):", "for copy in self._sources[name][::-1]:", live=True,
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
        "return decision.layout, decision.how",
        "return Layout(decision.layout.pipelines[::-1], decision.layout.microbatches[::-1]),"
        " decision.how", live=True,
    ),
    Mutant(
        "training.gradsync", "training/gradsync/policy/plan.py",
        "if other.seconds <= most), key=slow.lost)", "if other.seconds <= most), key=_seconds)",
    ),
    Mutant(
        "training.gradsync", "training/gradsync/policy/plan.py",
        "if job.lossy(best) and doubt > 1:", "if doubt > 1:",
    ),
    Mutant(
        "training.gradsync", "training/gradsync/live/executor.py",
        "_LiveGroup(place, planned.option, codec", "_LiveGroup(place, Option(), codec", live=True,
    ),
    Mutant(
        "training.emulate", "training/emulate/policy/search.py",
        "return Capture((0,),", "return Capture((1,),",
    ),
    Mutant(
        "training.emulate", "training/emulate/policy/checks.py",
        "_first_of_each(cases, run)[: max(room, 0)]", "_first_of_each(cases, run)[:1]",
    ),
)  # fmt: skip
