"""Questions that are drawn, for rules that a short run does not reach: the real policies answer them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from support.engine import TIME
from windtunnel.data.embeddings import policy as embeddings
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier
from windtunnel.data.ingest import policy as ingest
from windtunnel.serving.branching import policy as branching
from windtunnel.serving.branching.policy.predictor import BUCKETS, SPANS
from windtunnel.serving.engine import policy as admission
from windtunnel.serving.prefixcache import policy as prefixcache
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.variants.model import CPU, HostReplicas, Query, ReplicaHost, Variant, VariantCandidate
from windtunnel.serving.variants.policy.scale import LEGAL, Fleet, Load, Measured, Running
from windtunnel.serving.variants.policy.select import VariantQuery, Waiting
from windtunnel.store.eventlog import EventLog


def asked(log: EventLog, name: str, room: Any, observations: Iterable[Any]) -> None:
    """Decisions on ``observations`` by any of a capability's policies, one in two by the first."""
    rng, policies = random.Random(name), list(room.POLICIES)
    for observation in observations:
        policy = rng.choice([rng.choice(policies), policies[0]])
        log.decision(name, policy, observation, room.POLICIES[policy](observation))


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
                        admission.WaitingRequest(
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
                    tuple(rng.randint(1, 90) for _ in numbers),
                    tuple(rng.choice([0, rng.randint(1, 150)]) for _ in numbers),
                    tuple(
                        branching.BranchCandidate(
                            rng.randint(0, 4), unit, rng.randint(1, 9000), rng.randint(1, 30)
                        )
                        for unit in range(1, rng.randint(3, 7))
                    ),
                    rng.randint(-1, 6), TIME, rng.choice([0.8, 1.0, 1.3]),
                    tuple(rng.random() / 4 for _ in SPANS) * (at % 3 > 0),
                    tuple(0.8 + rng.random() / 2 for _ in range(BUCKETS)) * (at % 4 > 0),
                    rng.choice([0.2, 0.9]),
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
                yield prefixcache.Trials((0.0, 0.1, 0.2), tuple(rng.choice([1.0, 2.0]) for _ in range(3)))


def variants_questions() -> Iterator[Any]:
    """Observations that are drawn: of a variant on a CPU and one on an accelerator, cheap and dear ones."""
    rng = random.Random(3)
    for at in range(150):
        some = tuple(
            Variant(
                f"v{number}", "net", "task", hardware=rng.choice([CPU, "gpu"]), threads=rng.choice([1, 4]),
                batch=rng.choice([1, 8]), load=rng.choice([0.5, 5.0]), slope=rng.choice([0.001, 0.01]),
                intercept=rng.choice([0.0, 0.002, 0.12]), memory=rng.choice([1 << 20, 1 << 30]),
                accuracy=rng.choice([0.6, 0.7, 0.8]), price=rng.choice([1e-5, 1e-4]),
            )
            for number in range(3)
        )  # fmt: skip
        hosts = tuple(
            ReplicaHost(
                f"h{number}", rng.choice([CPU, CPU, "gpu"]), 4, rng.choice([1 << 25, 3 << 30, 9 << 30]),
                rng.choice([0.01, 0.2, 0.9]), rng.choice(["", "", "net"]),
            )
            for number in range(rng.randint(0, 3))
        )  # fmt: skip
        held = tuple(
            HostReplicas(
                f"h{number}", rng.choice(["active", "active", "overloaded"]), 1, rng.choice([0.0, 30.0]),
                rng.choice([0.0, 0.0, 0.3]), 1.0, rng.randint(0, 2),
            )
            for number in range(3)
        )  # fmt: skip
        query = Query(
            at, "task", rng.choice([1, 1, 1, 9]), rng.choice([0.0, 0.65, 0.9]),
            rng.choice([0.001, 0.05, 0.3, 7.0, inf]), rng.choice([inf, inf, inf, 1e-6]), rng.random() < 0.2,
        )  # fmt: skip
        candidates = tuple(VariantCandidate(variant, held[: rng.choice([0, 0, 1, 2])]) for variant in some)
        yield VariantQuery(
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
                variant, rng.choice([1, 2]), rng.choice([0.0, 0.02, 5.0, 90.0, 2000.0]),
                rng.choice([0, 0, 0, 3]),
                rng.choice(["active", "active", "overloaded"]), rng.choice([0.005, 0.2, inf]), 0.6,
                rng.choice([0, 9, 19, 299]),
            )
            for variant in some[: rng.randint(1, 2)]
        )  # fmt: skip
        if hosts:
            yield Load(hosts[0], running, some[2:], hosts[1:])
        yield Fleet(
            rng.choice([CPU, "gpu"]), hosts, rng.choice([0, 1]), rng.random() < 0.2, rng.choice([3, 20, 20]),
            rng.choice([0, 14, 200]), rng.choice([0, 0, 1]),
        )  # fmt: skip


def ingest_questions() -> Iterator[ingest.Observation]:
    """Observations that are drawn."""
    rng = random.Random(5)
    for _ in range(200):
        workers = tuple(
            ingest.SplitWorker(f"w{number}", rng.randint(0, 2)) for number in range(rng.randint(0, 6))
        )
        peers = tuple(
            ingest.PeerClient(
                rng.randint(0, 6), 0, rng.choice([0, 0, 1]), rng.random() < 0.6, rng.random() < 0.4
            )
            for _ in range(rng.randint(0, 3))
        )
        own = rng.choice([-1, 4, 9])
        yield ingest.SplitRequest(
            rng.choice(["pad", "drop", "uneven"]), 2, rng.choice([1, 2, 2, 2]), rng.randint(0, 2),
            rng.randint(0, 6), rng.random() < 0.6, 4, rng.choice([0, 1, 1, 5]), rng.randint(0, 1), workers,
            peers, last=rng.choice(["", "w0"]), sender=rng.choice(["", "", "w1"]), after=rng.choice([-1, 7]),
            ahead=rng.randint(0, 2), own=own,
        )  # fmt: skip
        batches = tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 3)))
        yield ingest.RankProgress(2, batches, tuple(rng.random() < 0.5 for _ in batches), rng.randint(0, 1))
        consumed, stalled, busy = rng.choice([0, 200.0]), rng.choice([0.0, 3.0]), rng.choice([4.0, 20.0])
        memory = ingest.LoadHistory(9.0, consumed, stalled, 190.0, busy)
        yield ingest.PoolLoad(
            ingest.ScalingBounds(1, 6), 1.0, rng.randint(0, 40), rng.choice([0.0, 0.3, 0.95]),
            rng.choice([0.2, 0.9]), rng.randint(0, 40), rng.choice([0.3, 2.0, 3.5]), rng.randint(1, 4),
            rng.randint(0, 4), rng.choice([1.0, 20.0, 20.0]), 20.0, memory,
        )  # fmt: skip
        yield ingest.WorkerSurplus(workers, rng.randint(0, 3))
        yield ingest.SplitFault(rng.choice(["skip", "fail"]), rng.random() < 0.3, rng.randint(1, 4))


def embeddings_questions() -> Iterator[embeddings.Observation]:
    """Tables that are drawn, for devices that have room for all of them, or for little."""
    rng = random.Random(8)
    for at in range(90):
        tables = []
        for number in range(rng.choice([1, 2, 3, 5, 9])):
            rows, dim = rng.choice([7, 100, 100, 5000]), rng.choice([3, 16, 64])
            points = rng.choice([1, 3, 3, rows if rows == 100 else 3])
            ranks = tuple(rows * point // points for point in range(points + 1))
            shares = tuple((rank / rows) ** 0.3 for rank in ranks)
            curve = (ranks, shares) if points > 1 else ((), ())
            state = rng.choice([0, 4, 4 * dim])
            mean, sequence = rng.choice([1.0, 30.0]), rng.random() < 0.5
            tables.append(
                EmbeddingTable(f"t{number}", rows, dim, "float32", mean, 1.0, sequence, *curve, state)
            )
        if at % 2:
            memory = rng.choice([None, None, 3e6])
            yield embeddings.ReplicationRequest(
                tuple(tables), rng.choice([1, 2, 4]), rng.choice([1, 2]), 1e9, 1e8, rng.choice([8.0, 500.0]),
                rng.random() < 0.5, memory, rng.random() < 0.3,
            )  # fmt: skip
        else:
            total = sum(table.total_bytes for table in tables)
            fast, slow = (
                MemoryTier(total / rng.choice([2, 9]), 1e11),
                MemoryTier(rng.choice([0.4, 0.5, 2.0]) * total, 1e9),
            )
            columns = rng.choice([0, 4, 16])
            yield embeddings.PlacementRequest(
                tuple(tables), rng.choice([1, 2, 2, 3]), fast, slow, 64, columns=columns, seed=at
            )  # fmt: skip
