"""``windtunnel network torus plan``: text in, a checked plan, its figures, and a file with every path."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.network.torus.policy import Decision, Observation, decide, name
from windtunnel.network.torus.policy.check import faults
from windtunnel.network.torus.policy.shape import check_sides, heads, nodes_of, paper_bound


@dataclass(frozen=True)
class TorusPlan:
    """A plan that was checked, and the ``file`` with its paths."""

    observation: Observation
    decision: Decision
    file: Path

    def plain(self) -> dict[str, Any]:
        """The figures as values of JSON; wavelengths are numbers of them, lengths are hops."""
        observation, decision = self.observation, self.decision
        return {
            "dims": list(observation.sides),
            "nodes": nodes_of(observation.sides),
            "pairs": len(decision.wavelengths),
            "method": decision.method,
            "wavelengths": decision.count,
            "lower_bound": decision.bound,
            "lower_bound_published": paper_bound(observation.sides) if min(observation.sides) > 2 else None,
            "longest_route": int(decision.routes.lengths.max()),
            "failed_links": [list(link) for link in observation.failed_links],
            "failed_nodes": list(observation.failed_nodes),
            "rerouted": len(decision.rerouted),
            "backup_wavelengths": decision.backups,
            "backup_lower_bound": decision.backup_bound,
            "backup_lower_bound_published": decision.paper_backup_bound,
            "file": str(self.file),
        }


def plan(dims: str, failed: Sequence[str] = (), method: str = "auto", out: Path | None = None) -> TorusPlan:
    """Plan an all-to-all, check it, and write its paths.

    ``dims``: ``3x3x3``. ``failed``: nodes (``0,1,2`` or ``5``), cables (``0,0,0-0,0,1``), or single
    directions of them (``0,0,0>0,0,1``). ``out``: a CSV file, by default torus-DIMS.csv.

    Raises:
        UserError: something given is wrong, or the file cannot be written.
    """
    sides = parse_sides(dims)
    file = out or Path(f"torus-{dims}.csv")
    if file.suffix != ".csv":
        raise UserError(f"`out`: {file} is not understood, accepted are names that end in .csv")
    links: list[tuple[int, int]] = []
    nodes: list[int] = []
    for text in failed:
        cut, both = ("-", True) if "-" in text else (">", False)
        ends = [_node(part, text, sides) for part in text.split(cut)]
        if len(ends) == 1:
            nodes.append(ends[0])
        elif len(ends) == 2:
            links += [(ends[0], ends[1])] + [(ends[1], ends[0])] * both
        else:
            raise UserError(_not_understood(text))
    observation = Observation(sides, tuple(dict.fromkeys(links)), tuple(dict.fromkeys(nodes)), method)
    decision = decide(observation)
    if wrong := faults(observation, decision):
        raise RuntimeError(f"a mistake of windtunnel's: {wrong[0]}")
    try:
        _write(file, observation, decision)
    except OSError as error:
        raise UserError(f"`out`: {file} cannot be written: {error.strerror or error}") from None
    return TorusPlan(observation, decision, file)


def parse_sides(text: str) -> tuple[int, ...]:
    """``3x3x3`` as numbers.

    Raises:
        UserError: it is no such text, or no torus that can be planned.
    """
    parts = text.split("x")
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(
            f"`dims`: {text!r} is not understood, accepted is the size of each side, such as 3x3x3"
        )
    return check_sides([int(part) for part in parts])


def _node(text: str, failure: str, sides: Sequence[int]) -> int:
    parts = text.strip().split(",")
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(_not_understood(failure))
    numbers = [int(part) for part in parts]
    if len(parts) == 1 and numbers[0] < nodes_of(sides):
        return numbers[0]
    if len(parts) != len(sides) or any(number >= side for number, side in zip(numbers, sides, strict=True)):
        shape = "x".join(map(str, sides))
        last = name(nodes_of(sides) - 1, sides)
        raise UserError(
            f"`failed`: {failure!r} names node {text}, which a torus of {shape} has not: accepted are "
            f"0 to {nodes_of(sides) - 1}, or coordinates up to {last}"
        )
    return int(np.ravel_multi_index(tuple(numbers), tuple(sides)))


def _not_understood(failure: str) -> str:
    return (
        f"`failed`: {failure!r} is not understood, accepted are a node (0,0,1), a cable (0,0,0-0,0,1) or one "
        "direction of it ('0,0,0>0,0,1')"
    )


COLUMNS = ("source", "destination", "wavelength", "route")


def _write(file: Path, observation: Observation, decision: Decision) -> None:
    """One row for each pair; its route is the nodes on the way, both ends included."""
    routes, pairs = decision.routes, len(decision.wavelengths)
    stops = routes.starts + np.arange(pairs + 1)
    nodes = np.empty(int(stops[-1]), dtype=np.int32)
    nodes[stops[:-1]] = routes.sources
    nodes[np.arange(len(routes.links)) + routes.pair_of_hop() + 1] = heads(observation.sides)[routes.links]
    flat, at = nodes.tolist(), stops.tolist()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    columns = (routes.sources.tolist(), routes.destinations.tolist(), decision.wavelengths.tolist())
    writer.writerows(
        (*row, " ".join(map(str, flat[at[place] : at[place + 1]])))
        for place, row in enumerate(zip(*columns, strict=True))
    )
    atomic.replace(file, text.getvalue())
