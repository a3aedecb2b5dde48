"""Observations that are drawn for the capabilities of training, and what is decided on them.

They stand in a recorded log after its live runs, each marked ``drawn``: they reach the rules that a short run
does not, are decided by the same `decide`, and have no effects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from windtunnel.training.checkpoint import policy as checkpoint
from windtunnel.training.checkpoint.model import Commit, Copy, Log, Persisted, Shard, StoredStep
from windtunnel.training.checkpoint.policy.restore import BadCopy
from windtunnel.training.elastic.policy import rules
from windtunnel.training.emulate import policy as emulate
from windtunnel.training.emulate.policy.groups import FamilyShape
from windtunnel.training.emulate.policy.search import name_of
from windtunnel.training.gradsync import policy as gradsync
from windtunnel.training.gradsync.model import (
    CodecCost,
    CodecPoint,
    CollectiveFit,
    GradientTensor,
    JobNetwork,
    Sparsity,
    SumTime,
    SyncProfile,
)
from windtunnel.training.pipelines import policy as pipelines
from windtunnel.training.pipelines.model import Reconfiguration, Stage, Template, TemplateSet
from windtunnel.training.pipelines.policy.commit import Standing


def any_of(kind: type, seed: int, count: int, /, **fields: Sequence[Any]) -> Iterator[Any]:
    """``count`` of ``kind``, each field drawn from what stands in ``fields``."""
    rng = random.Random(seed)
    for _ in range(count):
        yield kind(**{name: rng.choice(values) for name, values in fields.items()})


def elastic_drawn() -> Iterator[tuple[str, rules.Observation]]:
    """Each of the six questions, some hundred times in all."""
    for observation in _elastic_drawn():
        yield observation.rules.on_loss if isinstance(observation, rules.Change) else "replace", observation


def _elastic_drawn() -> Iterator[rules.Observation]:
    chosen = [
        rules.Rules(on_loss, minimum, most)
        for on_loss in ("replace", "shrink", "restart", "shrink-restart")
        for minimum in (1, 3) for most in (0, 3)
    ]  # fmt: skip
    places = [(), (0, 1, 2), (0, None, 2), (None, None, 2), (3, 1, 0), (None,) * 3]
    yes, seldom = [True, False], [False, False, True]
    yield from any_of(
        rules.Change, 1, 300, rules=chosen, target=[3], places=places, broken=[(), (), (1,)],
        spares=[(), (7,), (6, 4), (5, 8, 9)], coming=[0, 1, 3], forced=yes, own=yes, hit=yes,
        own_failures=[0, 0, 3], fruitless=[0, 30], progress=yes, lived=[1.0, 90.0],
        cause=["host 1 is lost"],
    )  # fmt: skip
    waits: dict[str, Sequence[float]] = {"waited": [0.1, 5.0, 9.0], "allowed": [5.0]}
    counts: dict[str, Sequence[int]] = {"times": [1, 3, 4]}
    yield from any_of(rules.Doubt, 2, 60, ranks=[(1,), (0, 2)], probed=yes, **waits, **counts)
    yield from any_of(
        rules.Doubt, 6, 20, ranks=[(1,)], probed=yes, unstarted=[(0,)], lived=[9.0, 130.0], **waits, **counts
    )
    pairs = [(), ((0, 2),), ((0, 2), (1, 2)), ((2, 0), (2, 1)), ((0, 2), (2, 0)), ((0, 1), (1, 2), (2, 0))]
    yield from any_of(
        rules.Reached, 3, 40, places=[(0, 1, 2), (2, 1, 0), (0, None, 2), (0, 1, 2, 3, 4)],
        answered=[(), (0, 1), (0, 1, 2), (0, 2)], silent=pairs,
    )  # fmt: skip
    yield from any_of(
        rules.Late, 4, 80, ranks=[(), (1, 2)], speaks=[True, True, False], unstarted=[(), (2,)],
        lived=[1.0, 130.0], **waits, **counts,
    )  # fmt: skip
    yield from any_of(rules.Overdue, 5, 60, first=yes, there=[2, 3], target=[3], coming=[0, 1], **waits)
    errors = [
        "", "Traceback\nValueError: once", "torch.distributed.DistNetworkError: gone",
        "RuntimeError: [gloo] Connection closed by peer", "RuntimeError: shapes differ",
    ]  # fmt: skip
    yield from any_of(
        rules.Ended, 6, 120, rank=[1], status=[None, 0, 1, 1, 2], hit=seldom, doubtful=seldom, less=seldom,
        error=errors, **counts,
    )  # fmt: skip


NEWEST = "newest"


def checkpoint_drawn() -> Iterator[tuple[str, checkpoint.Observation]]:
    """Slots, placements, chunks and windows; and what is there after losses, courses and faults."""
    for observation in _checkpoint_drawn():
        yield NEWEST, observation


def _checkpoint_drawn() -> Iterator[checkpoint.Observation]:
    held, ends = [(-1, -1), (3, -1), (3, 4), (5, 4), (4, 6), (5, 5)], [-1, 3, 4]
    for step, slot_steps, committed, base in product([4, 5], held, ends, ends):
        yield checkpoint.SlotWanted(step, slot_steps, committed, base)
    rooms = [0.0, 0.004, 0.05, 5.0, 900.0, None]
    yield from any_of(
        checkpoint.Sending, 3, 60, mode=["idle", "idle", "concurrent"], left=[900, 1 << 26], chunk=[1 << 20],
        bandwidth=[None, 1e6, 1e9], startup=[0.0, 0.001], room=rooms, busy=[0.0, 0.0, 0.01],
    )  # fmt: skip
    yield from any_of(
        checkpoint.NetworkSample, 4, 60, busy=[False, False, True], looks=[1, 2, 3], idle=[0.003, 0.02, 0.2],
        here=[None, 0.01, 0.1], longest=[0.0, 0.1], always=[False, False, True], window_open=[True, False],
        endless=[True, False], safety=[0.8], startup=[0.001],
    )  # fmt: skip
    ranks = [
        checkpoint.NetworkProfile(spans, nbytes, bandwidth)
        for spans in ((), (0.01,), (0.2, 0.05)) for nbytes in (64, 10**6) for bandwidth in (None, 1e6, 1e8)
    ]  # fmt: skip
    yield from any_of(
        checkpoint.Profiles, 7, 60, ranks=[*pairwise(ranks)], copies=[2, 3],
        buffer=[1 << 14, 1 << 20], parts=[1, 4], startup=[0.0, 0.004], safety=[0.8, 1.0],
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
        Copy(
            place, Shard(shard, step, 2, shared, generation, rng.choice("ll" "m"), 8, rng.choice("xxx" "y"))
        )
        for place in range(3) for step in (4, 5) for shard in [*shards, *(["shared"] if shared else [])]
        for generation in (1, 2) if rng.random() < density
    )  # fmt: skip
    stored = tuple(
        StoredStep(
            step, 1,
            tuple(Shard(name, step, 2, False, 1, "l", 8, "x") for name in shards[: rng.choice([1, 2, 2])]),
            rng.choice(["", "", "torn"]), "check",
        )
        for step in (2, 3, 4) if rng.random() < 0.5
    )  # fmt: skip
    known = tuple(Commit(step, course) for step in (4, 5) for course in (1, 2))
    log = Log(
        tuple(commit for commit in known if rng.random() < 0.7),
        tuple(Persisted(step, 1, "check") for step in (2, 3) if rng.random() < 0.7),
        rng.choice([-1, 5]), rng.choice([-1, 2, 5]),
    )  # fmt: skip
    bad = tuple(
        BadCopy(place, shard, step)
        for place in (0, None) for shard in ("", "rank1") for step in (4, 5) if rng.random() < 0.1
    )  # fmt: skip
    log_known, restart = rng.choice([None, log, log]), rng.random() < 0.5
    return checkpoint.Inventory(copies, stored, bad, log_known, restart, unread=rng.random() < 0.2)


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
        layouts = tuple(_template(rng, n0 + n) for n in range(count))
        templates, hosts = TemplateSet(n0, rng.choice([1, 2]), layouts), rng.choice([4, 7, 13, 90, 90])
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
            )  # fmt: skip


def _template(rng: random.Random, hosts: int) -> Template:
    """Stages for eight layers, one a host, of any time."""
    cuts = [8 * host // hosts for host in range(hosts + 1)]
    stages = [Stage(*cut, float(rng.randint(1, 40))) for cut in pairwise(cuts)]
    return Template(tuple(stages), 1.0)


SHAPES = (0, 87, 107, 193, 516, 735, 774, 880, 972)  # of jobs and networks that reach every rule of a plan

STEPS = {"fp16": 1.02, "dragonn:0.01": 1.24}  # to a loss; of zip they are not known


def gradsync_drawn() -> Iterator[tuple[str, gradsync.Observation]]:
    """Jobs of dense and sparse gradients on networks of all shapes."""
    for seed in SHAPES:
        rng = random.Random(seed)
        request = gradsync.PlanRequest(_profile(rng), rng.choice([(), ("fp16",)]), seed, STEPS)
        yield from (("search", replace(request, lossy=lossy)) for lossy in (True, False))


def _profile(rng: random.Random) -> SyncProfile:
    hosts, each = rng.choice([(1, 4), (4, 1), (3, 2), (1, 1)])
    tensors = [
        GradientTensor(f"p{n}", rng.choice([64, 1 << 16, 1 << 22]), 1e-4)
        for n in range(rng.choice([1, 3, 5]))
    ]
    for n in range(rng.choice([0, 0, 1])):
        growth = rng.choice([(), (1.5,), (1.5, 2.0, 3.0)])
        rows = Sparsity(1 << 14, 64, 4, rng.choice([0.0, 0.01, 0.5]), growth)
        table = GradientTensor(f"t{n}", 1 << 20, 1e-4, rows)
        tensors.insert(rng.randint(0, len(tensors)), table)
    rate, error = 10 ** rng.uniform(8, 11), rng.choice([0.0, 0.1, 0.5])
    calls = [
        CollectiveFit(scope, kind, 1e-5, (2.0 if scope == "between" else 1.0) / rate, error)
        for scope in ("flat", "inside", "between")
        for kind in ("allreduce", "reduce_scatter", "allgather", "alltoall")
    ]
    rows = (
        ("fp16", 0.5, 1e-11, True), ("dragonn:0.01", 0.02, 1e-10, False), ("zip:1", 0.01, 1e-10, True),
    )  # fmt: skip
    codecs = []
    for name, ratio, cost, summable in rows:
        points = tuple(
            CodecPoint(n, 1e-5 + n * cost, n * cost, n * cost, int(4 * n * ratio)) for n in (1 << 10, 1 << 20)
        )
        codecs.append(CodecCost(name, points, summable))
    sums = tuple(
        SumTime(tensor.name, scheme, rng.random())
        for tensor in tensors
        if tensor.sparsity
        for scheme in ("zen", "dense")
    )
    network = JobNetwork(hosts, each, tuple(calls), rng.choice([(), sums]))
    return SyncProfile(tuple(tensors), tuple(codecs), network, 1e-3, handing=rng.choice([0.0, 1e-5]))


MESHES: dict[str, tuple[tuple[str, int, int], ...]] = {
    # name, size and stride of each family
    "data": (("dp", 16, 1),), "pipeline": (("pp", 4, 4), ("tp", 4, 1)), "ring": (("cp", 8, 1), ("dp", 2, 8)),
    "deep": (("pp", 16, 2), ("tp", 2, 1)), "half": (("dp", 8, 1),),
}  # fmt: skip

CONDITIONS = (
    "", "v0 % 2 == 0", "v0 in (1, 3)", "v0 in {1, 5}", "{0: 1, 3: 2}.get(v0, 0)",
    "not v0 or v0 > 3 and v0 < 6", "0 < v0 < 9", "1 if v0 == 2 else -v0", "(0, 1, 2, 3)[v0 % 4]",
    "v0 in range(3, 5)", "hash(v0) == 3", "max(v0, 4) == 4", "v0 / 0", "1 << v0 * 300", "v0 * 'ab' == 'abab'",
    "range(1 << 20) == v0", "hash('a')", "v0.real", "(1 << 300) + v0", "unknown(v0)", "{v0: 1}", "v0.get(1)",
    "1 << 999",
)  # fmt: skip


def emulate_drawn() -> Iterator[tuple[str, emulate.Observation]]:
    """Worlds that are known, asked about until all of their ranks are."""
    rng = random.Random(1)
    for _ in range(120):
        name = rng.choice(list(MESHES))
        world = 16 if name != "deep" else 32
        families = [FamilyShape(label, size, True, stride) for label, size, stride in MESHES[name]]
        if name == "half":
            families = [FamilyShape("dp", 8, True, 0, tuple(range(8)) * 2)]
        odd = rng.choice([(), (0,), (world - 1,), (world // 2,), (5, 6), tuple(range(9, world))])
        kind = {rank: (rank in odd) + 2 * (rank // 4 if name == "pipeline" else 0) for rank in range(world)}
        if name == "deep":
            kind = {
                rank: rank // 2 if rank < world - 2 or rng.random() < 0.5 else 99 for rank in range(world)
            }
        observation = emulate.Observation(
            world, rng.choice(["auto"] * 6 + ["all", " all", "0,3-5"]), rng.choice([8, 256]),
            peers={"pipeline": (4,), "ring": (1, 7), "deep": (2,)}.get(name, ()), families=tuple(families),
            checks=rng.choice([0, 4, 16]), devices_per_host=8,
        )  # fmt: skip
        conditions = tuple(
            emulate.Condition(f"x.py:{n}", rng.choice(CONDITIONS), (0,), rng.random() < 0.3)
            for n in range(rng.choice([0, 1, 3]))
        )  # fmt: skip
        hidden = rng.choice([(), (7,), (7, 9)])  # call something else, where nobody has looked
        yield from _asked(observation, kind, conditions, hidden, rng.random() < 0.3)


def _asked(
    observation: emulate.Observation, kind: dict[int, int], conditions: tuple[emulate.Condition, ...],
    hidden: tuple[int, ...], refuses: bool,
) -> Iterator[tuple[str, emulate.Observation]]:  # fmt: skip
    policy = name_of(observation.ranks)
    classes: dict[int, int] = {}
    while True:
        yield policy, observation
        answer = emulate.POLICIES[policy](observation)
        if isinstance(answer, emulate.CheckedCells):
            return
        if isinstance(answer, emulate.Capture):
            for rank in answer.ranks:
                classes.setdefault(kind[rank] + 1000 * (rank in hidden), len(classes))
            captured = {
                rank: classes[kind[rank] + 1000 * (rank in hidden)]
                for rank in (*observation.captured, *answer.ranks)
            }
            calls = tuple(number for number in range(len(classes)))
            source = emulate.RankSource("x.py:1", {rank: rank for rank in captured})
            observation = replace(
                observation, captured=captured, calls=calls, conditions=conditions, sources=(source,)
            )
        else:
            outlines = {
                rank: -1 if refuses else classes.get(kind[rank] + 1000 * (rank in hidden), 50 + rank // 8)
                for rank in answer.ranks
            }
            observation = replace(observation, checked={**observation.checked, **outlines})
