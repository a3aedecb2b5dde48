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


def any_of(kind: type, seed: int, count: int, **fields: Sequence[Any]) -> Iterator[Any]:
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


PARITY: dict[str, Parity] = {
    "training.elastic": Parity(elastic_record, elastic_effects, elastic_twin),
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
)  # fmt: skip
