"""Which losses of several hosts at once do checkpoints in memory survive (GEMINI, section 4)?

Three answers side by side. The paper's formula, a lower bound by the union of the fatal losses; the exact
probability (`policy.probability`), held against every choice of hosts; and real kills: memory services
that hold real shards are killed, k at once with their memory, and the newest step is read back from the rest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import combinations

from windtunnel.bench.rows import Row
from windtunnel.training.checkpoint.bench.harness import SOURCE
from windtunnel.training.checkpoint.bench.memory_hosts import Hosts
from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.placement import Kind, copy_sets, place, survives
from windtunnel.training.checkpoint.policy.probability import (
    enumerate_recovery,
    recovery,
)

row = partial(Row, "placement")
PLACES, COPIES = 8, 2  # of the real kills
SHARD = 64 << 10  # bytes
SEED = 20230923
RACKS = tuple(f"rack{at // 4}" for at in range(16))
KINDS: tuple[Kind, ...] = ("group", "ring", "mixed", "domains")


def union_bound(places: int, copies: int, lost: int) -> float:
    """The paper's corollary 1 for placement "group", in [0, 1]."""
    if lost < copies:
        return 1.0
    fatal = places / copies * math.comb(places - copies, lost - copies) / math.comb(places, lost)
    return max(0.0, 1.0 - fatal)


def placement_rows(quick: bool) -> Iterator[Row]:
    """The rows of this section."""
    yield from _published()
    yield from _mixed()
    yield from _racks()
    yield from _killed(quick)


def _exact(name: str, placement: Placement, lost: int, **fields: object) -> Row:
    found = recovery(placement, lost).exact
    agrees = found == enumerate_recovery(placement, lost)
    value = 100 * float(found) if found is not None else None
    target = "exact: as every choice counted"
    return row(name, "%", emulated=value, target=target, met=agrees, **fields)  # type: ignore[arg-type]


def _published() -> Iterator[Row]:
    for lost in (2, 3, 4):
        yield _exact(
            f"16 hosts, 2 copies, {lost} lost: group, recovered from memory",
            place(16, 2, "group"),
            lost,
            published=100 * union_bound(16, 2, lost),
            source=f"{SOURCE}: the formula of corollary 1, evaluated here",
            note="the published formula is a lower bound, exact below twice as many as there are copies",
        )
        yield _exact(f"16 hosts, 2 copies, {lost} lost: ring", place(16, 2, "ring"), lost)


def _mixed() -> Iterator[Row]:
    places, copies = 7, 2
    placement = place(places, copies, "mixed")
    fewest = -(-places // copies)
    gap = 100 * (len(copy_sets(placement)) - fewest) / math.comb(places, copies)
    bound = 100 * (2 * copies - 3) / math.comb(places, copies)
    yield row(
        f"{places} hosts, {copies} copies, {copies} lost: mixed, distance from any placement's best",
        "%",
        emulated=gap,
        published=bound,
        source=f"{SOURCE}: (2m - 3) / C(N, m) at most, evaluated here",
        target="at most as published",
        met=gap <= bound + 1e-9,
        note=f"{len(copy_sets(placement))} copy sets, no placement has fewer than {fewest}",
    )


def _racks() -> Iterator[Row]:
    for lost in (1, 2):
        for kind in KINDS:
            placement = place(16, 2, kind, RACKS if kind == "domains" else ())
            yield row(
                f"16 hosts in 4 racks, 2 copies, {lost} of the racks lost: {kind}",
                "%",
                emulated=100 * recovery(placement, lost, RACKS).value,
                target="100 % for one rack" if kind == "domains" and lost == 1 else "",
                met=recovery(placement, lost, RACKS).value == 1.0
                if kind == "domains" and lost == 1
                else None,
            )


def trials(lost: int, quick: bool) -> list[tuple[int, ...]]:
    """Which hosts are killed: every choice of two, a sample of larger ones."""
    every = list(combinations(range(PLACES), lost))
    draw = random.Random(SEED + lost)
    if quick:
        return draw.sample(every, 5)
    return every if lost == 2 else draw.sample(every, 24)


def _killed(quick: bool) -> Iterator[Row]:
    plan: list[tuple[Kind, int]] = [("group", 2), ("group", 3), ("group", 4), ("ring", 2)]
    with Hosts(PLACES, SHARD) as hosts:
        for kind, lost in plan[:2] if quick else plan:
            placement = place(PLACES, COPIES, kind)
            chosen = trials(lost, quick)
            recovered = expected = agreed = 0
            for gone in chosen:
                hosts.save(COPIES, kind)
                hosts.kill(gone)
                found, said = hosts.readable(), survives(placement, gone)
                recovered, expected, agreed = recovered + found, expected + said, agreed + (found == said)
            every = len(chosen) == math.comb(PLACES, lost)
            yield row(
                f"{PLACES} memory services, {COPIES} copies, {lost} killed and wiped: {kind}, step read back",
                "%",
                measured=100 * recovered / len(chosen),
                emulated=100 * recovery(placement, lost).value,
                target="each kill ends as the placement says",
                met=agreed == len(chosen),
                note=f"{recovered} of {len(chosen)} kills survived, {expected} should "
                + ("(every choice)" if every else f"(a sample of {math.comb(PLACES, lost)} choices)"),
            )
