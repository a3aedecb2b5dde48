"""ZEN's sum against five others, timed between namespaces with limited links.

Beside windtunnel's schemes two of others: the sparse parameter server with a contiguous part at each rank
(*server*; Parallax, EuroSys '19), and the same with blocks of 256 elements, sent if any of them is not zero
(*blocks*; OmniReduce, SIGCOMM '21). Every scheme sums the same gradients in the same processes, in pairwise
rounds, over links whose rate the processors of this host can follow with that many ranks.

Gradients are of one density on all ranks. Of *elements* and *rows*, indices are drawn with the chances of
Zipf's law, the frequent ones first: ranks have much in common, and contiguous parts are uneven. Those of
*apart* are drawn evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness.ranks import MBIT, interface_bytes, ranks
from benchmarks.harness.rows import Row, figure, need
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.sparse import all_reduce, least_times, measure, push_pull, tried
from windtunnel.training.gradsync.live.units import Units
from windtunnel.training.gradsync.model import CollectiveFit, JobNetwork
from windtunnel.training.gradsync.policy.sparse import SCHEMES

KINDS = {"elements": (1, 1.6), "rows": (8, 1.2), "apart": (8, 0.0)}
"""Width of a unit, and the power of Zipf's law that it is drawn by."""
ELEMENTS = 2**19
FEW = (8, 20, ELEMENTS, (*KINDS,))
MANY = (16, 5, ELEMENTS // 2, ("elements", "apart"))
"""Ranks, Mbit/s of each one's link, elements of the gradients, and their kinds."""
DENSITIES = (0.001, 0.01, 0.05, 0.2)
LIMIT = 400.0
"""Seconds that the ranks of one fabric may take."""
SHORT = 0.02
"""Seconds below which rounds and the turns of processes decide how long a sum takes, not bytes."""
BLOCK = 256
ALL = (*SCHEMES, "blocks", "server")
OTHERS = tuple(name for name in ALL if name not in ("zen", "dense"))
REPEATED = 0.5
"""Seconds for which a short sum is repeated: its least time counts."""


def indices(rank: int, units: int, density: float, power: float) -> NDArray[np.int64]:
    """The units of a rank, ascending: drawn without replacement by adding Gumbel's noise to the logarithm of
    their chances."""
    rng = np.random.default_rng([rank, units, round(density * 1e6)])
    keys = -power * np.log(np.arange(1, units + 1)) + rng.gumbel(size=units)
    count = max(1, round(units * density))
    return np.sort(np.argpartition(keys, units - count)[units - count :]).astype(np.int64)


def blocks_of(units: Units) -> Units:
    """The same elements in blocks of `BLOCK`, without those that are all zero."""
    row, column = units.values.nonzero(as_tuple=True)
    elements = units.indices[row] * units.width + column
    there, where = torch.unique_consecutive(elements // BLOCK, return_inverse=True)
    values = units.values.new_zeros(len(there), BLOCK)
    values[where, elements % BLOCK] = units.values[row, column]
    return Units(there, values, -(-units.total * units.width // BLOCK))


def main(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """On each rank: of each case its kind and density, what was chosen, and of each scheme the
    seconds and bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = (world - 1) / world / arguments["rate"]
    lines = CollectiveFit("flat", "alltoall", 0.0, each), CollectiveFit("flat", "allreduce", 0.0, 2 * each)
    links = JobNetwork(world, 1, lines)
    found = []
    whole: dict[str, tuple[float, int]] = {}
    for kind, density in arguments["cases"]:
        width, power = KINDS[kind]
        units = arguments["elements"] // width
        mine = torch.from_numpy(indices(rank, units, density, power))
        values = torch.randn(len(mine), width, generator=torch.Generator().manual_seed(rank))
        gradient = torch.sparse_coo_tensor(
            mine[None], values, (units, width), is_coalesced=True, check_invariants=False
        )
        given = Units(mine, values, units)
        one = measure(Peers(), given, sample=4096)
        sent: dict[str, int] = {}

        def summed(
            scheme: str, gradient: torch.Tensor = gradient, given: Units = given, sent: dict[str, int] = sent
        ) -> None:  # fmt: skip
            before = interface_bytes()
            if scheme in SCHEMES:
                all_reduce(gradient, scheme=scheme)
            else:
                push_pull(Peers(), blocks_of(given) if scheme == "blocks" else given, None)
            sent[scheme] = interface_bytes() - before

        trial = tried(gradient, one, links)
        # all is as long whatever is zero
        timed = [name for name in ALL if name != "dense" or kind not in whole]
        times = least_times({name: partial(summed, name) for name in timed}, REPEATED)
        whole[kind] = whole.get(kind) or (times["dense"], sent["dense"])
        told = {name: (times[name], sent[name]) if name in times else whole[kind] for name in ALL}
        found.append(
            {
                "kind": kind, "density": density, "chosen": min(trial, key=trial.__getitem__),
                "schemes": told,
            }
        )  # fmt: skip
    return found


def sparse_rows(quick: bool) -> Iterator[Row]:
    """Times, bytes and choices between 8 ranks."""
    yield from _live(FEW, DENSITIES[1:3] if quick else DENSITIES)


def sparse_16_rows(quick: bool) -> Iterator[Row]:
    """The same between 16 ranks, which takes minutes; and ZEN there against the best of the others."""
    need("not in a quick run" * quick)
    gains = []
    for row in _live(MANY, DENSITIES):
        yield row
        if "elements" in row.name and "0.1%" not in row.name and row.measured is not None:
            gains.append(row.measured)
    if gains:
        yield figure(
            "high overlap: time of best other sparse scheme / zen's", "x", max(gains), ">= 2 x",
            published=5.09, source="ZEN (OSDI '25): up to 5.09x over the state of the art",
            note="elements by Zipf's law, from 1 % on; the largest",
        )  # fmt: skip


def _live(fabric: tuple[int, int, int, tuple[str, ...]], densities: Sequence[float]) -> Iterator[Row]:
    worst: list[tuple[float, float, str]] = []
    with ranks("windtunnel.training.gradsync.live.sparse") as run:
        world, rate, elements, kinds = fabric
        given = {"rate": rate * MBIT, "elements": elements, "cases": [*product(kinds, densities)]}
        told = run(f"{main.__module__}:main", given, world, rate * MBIT, LIMIT)
        for cases in zip(*told, strict=True):
            case, chosen = cases[0], cases[0]["chosen"]
            times = {name: one[0] for name, one in case["schemes"].items()}
            best, rival = min(times.values()), min(times[name] for name in OTHERS)
            name = f"{world} ranks at {rate} Mbit/s, {case['kind']} {case['density']:.1%}"
            words = ", ".join(
                f"{name} {taken * 1e3:.0f} ms {max(one['schemes'][name][1] for one in cases) / 2**20:.2f} MiB"
                for name, (taken, _) in case["schemes"].items()
            )
            yield figure(
                f"{name}: best other sparse scheme / zen", "x", rival / times["zen"],
                note=f"{words}; chosen: {chosen}, {times[chosen] / best:.2f} x the best",
            )  # fmt: skip
            worst.append((times[chosen] / best, best, name))
    for words, judged in (
        (f"sums of {SHORT:g} s and more", [one for one in worst if one[1] >= SHORT]),
        ("shorter sums", [one for one in worst if one[1] < SHORT]),
    ):
        if judged:
            ratio, _, name = max(judged)
            right = sum(one[0] <= 1.05 for one in judged)
            yield figure(
                f"chosen scheme's time / best scheme's, worst case, {words}", "x", ratio, "<= 1.05 x",
                note=f"{name}; met in {right} of {len(judged)} cases",
            )  # fmt: skip
