"""Ingestion, embeddings and groups: sessions of real masters, workers and clients, tables on real ranks, and
chains of real engines."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from parity import Event, Mutant, Parity, drawn
from parity.questions import embeddings_questions, ingest_questions
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.data.embeddings import policy as embeddings
from windtunnel.data.files import policy as files_policy
from windtunnel.data.group import policy as group
from windtunnel.data.group import twin as group_twin
from windtunnel.data.ingest import policy as ingest
from windtunnel.data.ingest.policy.autoscaler import Autoscaler
from windtunnel.store import eventlog
from windtunnel.store.eventlog import EventLog

SMALL = ingest.ScalingBounds(1, 2, start=0.1, cooldown=0.1)
SESSIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pad", {"scaling": SMALL}),
    ("drop", {"workers": 3, "policy": "static"}),
    ("uneven", {"workers": 2}),
)
"""Ways to end an epoch, and workers."""


def sessions(folder: Path) -> Iterator[Path]:
    """The log of each session: two ranks for two epochs, the second of them slower. In the first a worker
    goes, or the bounds of their number are raised; they are lowered in the second."""
    from support import ingest as support
    from windtunnel.data.ingest.live.calls import MasterSettings
    from windtunnel.data.ingest.live.client import IngestClient

    for ends, more in SESSIONS:
        (folder / ends).mkdir()
        log = folder / ends / "session" / eventlog.NAME
        session = replace(support.table(folder / ends, 4000), epochs=2, batch=32, split_rows=250)
        settings = MasterSettings(ends=ends, worker_lease=0.5, **{**support.QUICK, **more})
        with support.serving(session, log.parent, settings) as master:

            def feed(client: IngestClient, epoch: int, master: Any = master) -> None:
                for taken in count():
                    if client.next() is None:
                        return
                    if client.name == "1":
                        threading.Event().wait(0.01)
                        if taken == 10:
                            _change(master, epoch)

            clients = [
                IngestClient(master.address, support.KEYS, str(rank), 2, buffer=2) for rank in range(2)
            ]
            for epoch in range(2):
                _together(partial(feed, client, epoch) for client in clients)
                if not epoch:
                    _together(client.begin for client in clients)
            last = time.monotonic() + 5.0  # where something is wrong it never comes
            while ingest_effects(eventlog.read(log)) and time.monotonic() < last:
                time.sleep(0.05)
            for client in clients:
                client.close()
        yield log


def _together(work: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def _change(master: Any, epoch: int) -> None:
    with master._turn:
        crew = master.crew
        if master.settings.workers is None:
            crew.scaler.settings = replace(SMALL, least=1, most=1) if epoch else replace(SMALL, least=2)
        elif not epoch:
            crew._pool.kill(next(iter(master._serves.values()), ""))


def ingest_effects(events: Sequence[Event]) -> list[str]:
    """Workers were asked for the splits that clients were to have from them, and started and ended as
    decided."""
    wrong: list[str] = []
    granted, asked = set[tuple[Any, ...]](), set[tuple[Any, ...]]()
    holders: dict[int, str] = {}
    running, leaving, gone = set[str](), set[str](), set[str]()
    for event in events:
        decision, observation = event.get("decision") or {}, event.get("observation") or {}
        match event["kind"], decision.get("is"):
            case "master", _:
                wrong += _missing(granted, asked, gone, leaving)
                for some in (granted, asked, running, leaving, gone, holders):
                    some.clear()
            case "decision", "SplitGrant" | "ReadAhead" if "client" in event:
                granted.add((decision["worker"], event["client"], event["epoch"], decision["split"]))
            case "asked", _:
                for client, epoch, split, _ in event["splits"]:
                    asked.add((event["worker"], client, epoch, split))
            case "decision", "PoolSize" if "now" in event:
                if len(running) != observation["workers"]:
                    wrong.append(f"{sorted(running)} run, decided {observation['workers']}")
            case "decision", "DrainWorkers":
                leaving.update(decision["workers"])
            case "worker starts", _:
                running.add(event["name"])
            case "worker leaves", _:
                running.discard(event["name"])
                if event["name"] not in leaving:
                    wrong.append(f"{event['name']} was told to leave, decided {sorted(leaving)}")
            case "worker gone", _:
                running.discard(event["name"])
                gone.add(event["name"])
            case "drawn", _:
                break
    return wrong + _missing(granted, asked, gone, leaving)


def _missing(
    granted: set[tuple[Any, ...]], asked: set[tuple[Any, ...]], gone: set[str], leaving: set[str]
) -> list[str]:
    """What was asked for without a decision, and the other way round; and who was to leave, and did not."""
    other = [f"{split} asked for, which was not decided" for split in sorted(asked - granted)]
    # one that was killed told no more of what it was asked for
    never = [split for split in sorted(granted - asked) if split[0] not in gone - leaving]
    stays = [f"{name} was to leave, and did not" for name in sorted(leaving - gone)]
    return other + [f"{split} decided, which was not asked for" for split in never] + stays


def ingest_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """How many workers there should be, by what live saw in each period."""
    pairs: list[tuple[Any, Any]] = []
    scaler: Autoscaler | None = None
    for event in events:
        if event["kind"] == "master":
            scaler = None
        if event["kind"] != "decision" or "now" not in event:
            continue
        observation = from_plain(
            ingest.PoolLoad, {key: value for key, value in event["observation"].items() if key != "is"}
        )
        if scaler is None:
            sizes: list[ingest.PoolSize] = []
            scaler = Autoscaler(
                observation.settings, observation.workers, event["now"], ingest.POLICIES[event["policy"]],
                lambda now, observation, scale: sizes.append(scale),  # noqa: B023
            )  # fmt: skip
            scaler.up, scaler.down = event["now"] - observation.up, event["now"] - observation.down
            scaler.memory = observation.memory
        scaler.settings = observation.settings
        scaler.period(
            event["now"], observation.period, consumed=observation.consumed, stalled=observation.stalled,
            buffered=observation.buffered, produced=observation.produced, busy=observation.busy,
            ready=observation.ready,
        )  # fmt: skip
        pairs.append((event["decision"], to_plain(sizes.pop(), tag=True)))
    return pairs


def _ingest(folder: Path) -> Sequence[Path]:
    log = EventLog(folder / "drawn.jsonl")
    log.append("drawn")
    for observation in ingest_questions():
        policy = (
            "static"
            if isinstance(observation, ingest.PoolLoad) and observation.consumed % 4 == 0
            else "starvation"
        )
        log.decision("data.ingest", policy, observation, ingest.POLICIES[policy](observation))
    log.close()
    return [*sessions(folder), log.path]


def _embeddings(folder: Path) -> Sequence[Path]:
    from support.embeddings import spread
    from windtunnel.data.embeddings.live.build import build

    log = EventLog(spread(folder))
    for observation, policy in product(embeddings_questions(), embeddings.POLICIES):
        try:
            decision = embeddings.POLICIES[policy](observation)
        except UserError:  # there is no room
            continue
        log.decision("data.embeddings", policy, observation, decision)
        if isinstance(observation, embeddings.PlacementRequest) and isinstance(
            decision, embeddings.TablePlacement
        ):
            statistics: Any = SimpleNamespace(
                folder=folder, tables=observation.tables, order=lambda name: None
            )
            shards = [
                [device, shard.name, shard.dim, shard.fast_rows]
                for device in range(observation.devices)
                for shard in build(decision, statistics, device).values()
            ]
            log.append("built", shards=shards)
    log.close()
    return [log.path]


def embeddings_effects(events: Sequence[Event]) -> list[str]:
    """Hot rows lie on every rank, warm ones once in every host, cold ones once; devices have the shards of
    the plan."""
    wrong: list[str] = []
    held, placed = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
    observation, decision, spread = dict[str, Any](), dict[str, Any](), list[tuple[Any, Any]]()
    for event in events:
        match event["kind"]:
            case "decision":
                observation, decision = event["observation"], event["decision"]
                if observation["is"] == "ReplicationRequest":
                    spread.append((observation, decision))
            case "placed":
                placed[event["rank"]].append(event["rows"])
            case "holds":
                held[event["rank"]].append(event["rows"])
            case "built":
                dims = {table["name"]: table["dim"] for table in observation["tables"]}
                decided = []
                for shard in sorted(decision["shards"], key=lambda shard: shard["device"]):
                    first, last, name = shard["first"], shard["last"], shard["table"]
                    named = name if last - first == dims[name] else f"{name}[{first}:{last}]"
                    decided.append([shard["device"], named, last - first, shard["fast_rows"]])
                if event["shards"] != decided:
                    wrong.append(f"{event['shards']} were built, decided {decided}")
    # ranks write in no order: their n-th lines belong to the n-th decision
    for (observation, decision), *rows in zip(spread, *(held[rank] for rank in sorted(held)), strict=False):
        wrong += _spread_otherwise(observation, decision, dict(enumerate(rows)))
    for rank, reported in placed.items():
        counts = [{name: len(rows) for name, rows in some.items()} for some in held[rank]]
        wrong += [f"rank {rank} has {counts} rows, and said {reported}"] * (counts != reported)
    return wrong


def _spread_otherwise(observation: Any, decision: Any, held: dict[int, dict[str, list[int]]]) -> list[str]:
    wrong = []
    for table, cuts in zip(observation["tables"], decision["tables"], strict=True):
        for row in range(table["rows"]):
            on = [rank for rank in held if row in held[rank][table["name"]]]
            hosts = sorted(rank // observation["devices"] for rank in on)
            if row < cuts["hot"]:
                right = len(on) == len(held)
            elif row < cuts["warm"]:
                right = hosts == list(range(observation["hosts"]))
            else:
                right = len(on) == 1
            if not right:
                wrong.append(f"row {row} of {table['name']} lies on ranks {on}, decided {cuts}")
    return wrong[:5]


def _group(folder: Path) -> Sequence[Path]:
    from support.group import lost_one

    return [lost_one(folder), drawn(folder, "data.group", _standings(random.Random(6)))]


def _standings(draw: random.Random) -> Iterator[tuple[str, Any]]:
    for number in range(300):
        new = draw.random() < 0.2
        members = tuple(
            group.MemberState(f"m{place}", draw.choice("xyz"))
            if new
            else group.MemberState(
                f"m{place}", draw.choice("xyz"), draw.random() < 0.9, draw.randrange(1, 4), draw.randrange(3),
                draw.randrange(3), draw.random() < 0.6, draw.random() < 0.2, draw.choice([4096] * 9 + [8192]),
                draw.choice([0, 8 * group.SLOT]),
            )
            for place in range(draw.randrange(1, 7))
        )  # fmt: skip
        coordinator, least = draw.choice(["", "x", "y"]), draw.randrange(1, 4)
        observation = group.Observation(4, members, coordinator, least, draw.choice([4, 64]))
        yield "given" if number % 10 == 0 else "domains", observation


def group_effects(events: Sequence[Event]) -> list[str]:
    """Engines stand in the chain, in the epoch and at the operation that were decided, and those were copied
    to that were to be compared."""
    wrong: list[str] = []
    for event, after in pairwise([*events, {"kind": "the end"}]):
        decision = event.get("decision") or {}
        if event["kind"] == "decision" and "drawn" not in event and decision["chain"]:
            count = len(decision["chain"])
            decided = {
                "chain": decision["chain"], "source": decision["source"],
                "copied": sorted(decision["compare"]),
                "epoch": [decision["epoch"]] * count, "sequence": [decision["sequence"]] * count,
            }  # fmt: skip
            did = {name: after.get(name) for name in decided}
            did["copied"] = sorted(did["copied"] or [])
            wrong += [f"{did} was done, decided {decided}"] * (did != decided)
    return wrong


def group_in_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """The first chain, and the one after its loss."""
    live = [event for event in events if event["kind"] == "decision" and "drawn" not in event]
    decisions = [from_plain(group.Decision, event["decision"]) for event in live[:2]]
    observation = from_plain(group.Observation, live[0]["observation"])
    (lost,) = set(decisions[0].chain) - set(decisions[1].chain)
    there = group_twin.lives(
        observation.members, {decisions[1].sequence: lost}, decisions[1].sequence,
        window=observation.window, coordinator=observation.coordinator,
    )  # fmt: skip
    return list(zip(decisions, there, strict=True))


def files_logs(folder: Path) -> list[Path]:
    """Three hosts, of which the primary is killed while a client writes, and comes again; and drawn ones."""
    from windtunnel.data.files.live import host as live
    from windtunnel.data.files.model import LEAST_RING, FilesError, FilesHostSpec, OperationKind, Status

    spec = FilesHostSpec("", "", "", "", least=2, ring=LEAST_RING)
    with (
        live.hosts(folder / "hosts", 3, spec) as hosts,
        contextlib.closing(live.client(folder / "hosts")) as files,
        contextlib.suppress(FilesError, TimeoutError),  # of hosts that do not as decided: their logs say so
    ):
        live.complete(files, 3)
        files.perform(OperationKind.CREATE, "/a")
        for number in range(60):
            files.write("/a", -1, bytes(60_000))
            if number == 20:
                live.complete(files, 3)
                leads = {row.name for row in files.status() if isinstance(row, Status) and row.leads}
                lost = next(host for host in hosts if host.spec.name in leads)
                lost.kill()
            if number == 40:
                lost.revive()
        files.sync()
        live.complete(files, 3)
    logs = [Path(host.spec.folder, eventlog.NAME) for host in hosts]
    return [*logs, drawn(folder, "data.files", _memberships(random.Random(9)))]


def _memberships(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for _ in range(120):
        others = tuple(
            files_policy.ChainPeer(
                name, rng.choice([0.0, 0.0, 9.0]), rng.randint(1, 4), rng.choice([3, 3, 3, 4]),
                name == "b" and rng.random() < 0.3, rng.random() < 0.8,
            )
            for name in "bc"
        )  # fmt: skip
        chain = tuple(rng.choice(["abc", "bac", "cab", "bc"]))
        leads = chain[0] == "a" and rng.random() < 0.7
        yield "linefs", files_policy.ChainView(
            "a", rng.randint(1, 4), 3, chain, others, 2, leads, rng.random() < 0.8, rng.random() < 0.2,
            rng.choice(["", "", "d", "b"]) if leads else "",
        )  # fmt: skip
        mode: Any = rng.choice(["linefs", "serial", "host"])
        yield (
            "linefs",
            files_policy.PipelineLoad(
                mode, (1,), rng.choice([0.0, 0.25, 0.75]), rng.randint(1, 4), rng.random(), rng.random() < 0.5
            ),
        )


def files_effects(events: Sequence[Event]) -> list[str]:
    """An epoch that a host decided is the one that began, with its chain, or another host was first."""
    wrong: list[str] = []
    open_decisions: dict[str, Event] = {}
    for event in events:
        if "drawn" in event or event.get("capability") != "data.files":
            continue
        host, decision = event["host"], event.get("decision")
        if decision is None:
            decided = open_decisions.pop(host, None)
            if decided is None:
                continue
            if event["leads"] and (event["epoch"], event["chain"]) != (decided["epoch"], decided["chain"]):
                wrong.append(f"{host}: epoch {event['epoch']} of {event['chain']}, decided {decided}")
            if not event["leads"] and event["epoch"] < decided["epoch"]:
                wrong.append(f"{host}: follows in epoch {event['epoch']}, decided {decided}")
        elif decision["is"] == "ChainChange":
            open_decisions[host] = decision
    return wrong


PARITY = {
    "data.files": Parity(files_logs, files_effects),
    "data.group": Parity(_group, group_effects, group_in_twin),
    # beyond: what is done where a solver ends without any solution
    "data.embeddings": Parity(
        _embeddings, embeddings_effects, beyond=("return None, lower", "break", "return False")
    ),
    "data.ingest": Parity(_ingest, ingest_effects, ingest_twin),
}
INGEST, EMBEDDINGS, GROUP = "data/ingest/", "data/embeddings/", "data/group/"
MUTANTS = (
    Mutant(
        "data.files", "data/files/policy.py", "if peer.silent <= LEASE}", "if peer.silent <= 9 * LEASE}"
    ),
    Mutant("data.files", "data/files/policy.py", "pipeline.queued > 0.5", "pipeline.queued > 0.2"),
    Mutant(
        "data.files", "data/files/live/nic.py", "tuple(hosts[name] for name in decision.chain)",
        "tuple(hosts[name] for name in sorted(decision.chain, reverse=True))", live=True,
    ),
    Mutant(
        "data.ingest", INGEST + "policy/__init__.py",
        "if ask.reading and (ask.reading >= most or ask.left <= empty):",
        "if ask.reading and ask.reading >= most:",
    ),
    Mutant(
        "data.ingest", INGEST + "live/master.py",
        '"address": self.crew.there[worker].address', '"address": min(self.crew.there.items())[1].address',
        live=True,
    ),
    Mutant(
        "data.ingest", INGEST + "live/crew.py", 'return {"drain": worker.drain}', 'return {"drain": False}',
        live=True,
    ),
    Mutant(
        "data.group", GROUP + "policy.py", "(standing.epoch, standing.sequence, standing.steady)",
        "(standing.sequence, standing.epoch, standing.steady)",
    ),
    Mutant("data.group", GROUP + "policy.py", "(candidate != last, left[candidate],",
        "(left[candidate], candidate != last,"),
    Mutant(
        "data.group", GROUP + "live/client.py", "for name in decision.compare}",
        "for name in decision.compare[1:]}",
        live=True,
    ),
    Mutant(
        "data.group", GROUP + "live/engine.py", "= self.fenced, frame.a, True",
        "= self.fenced, self.sequence, True", live=True,
    ),
    Mutant(
        "data.embeddings", EMBEDDINGS + "policy/greedy.py", "sums[device] += weights[place]",
        "sums[device] += 1.0",
    ),
    Mutant(
        "data.embeddings", EMBEDDINGS + "live/sharded.py", "decision.tables, [table.rows for",
        "decision.tables[::-1], [table.rows for", live=True,
    ),
)  # fmt: skip
