"""The pipelines of a large job that a change can touch, found without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from windtunnel.training.pipelines.model import Layout

Pipeline = tuple[int, ...]


class Neighbourhood:
    """Follows a layout through its changes; pipelines are in the order of size and lowest id, as in all."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._home: dict[int, tuple[int, int]] = {}
        self._settle(layout.pipelines)

    def near(self, lost: Sequence[int], joined: Sequence[int]) -> list[int]:
        """Where the pipelines are that the local rules can touch.

        Those that lost hosts; for each host that is missing or joins, one of the largest (they yield)
        and one of the shortest (they merge and grow); and two more, so that no layer seems lost.
        """
        pipelines = self.layout.pipelines
        homes = {self._home[host] for host in lost if host in self._home}
        struck = {bisect_left(pipelines, home, key=_order) for home in homes}
        count = sum(len(pipelines[i]) for i in struck) + len(joined) + 2
        return sorted(
            struck
            | _first(range(len(pipelines)), struck, count)
            | _first(range(len(pipelines) - 1, -1, -1), struck, count)
        )

    def part(self, near: Sequence[int]) -> Layout:
        """The layout of those pipelines alone."""
        pipelines, shares = self.layout.pipelines, self.layout.microbatches
        return Layout(tuple(pipelines[i] for i in near), tuple(shares[i] for i in near))

    def merged(self, near: Sequence[int], new: Iterable[Pipeline]) -> list[Pipeline]:
        """All pipelines with ``new`` ones in place of those that are ``near``."""
        found = list(self.layout.pipelines)
        for i in reversed(near):
            del found[i]
        for pipeline in new:
            insort(found, pipeline, key=_order)
        return found

    def change(self, near: Sequence[int], new: Sequence[Pipeline], layout: Layout) -> None:
        """``layout`` holds from now on; in it ``new`` pipelines took the place of those that are ``near``."""
        for i in near:
            for host in self.layout.pipelines[i]:
                del self._home[host]
        self.layout = layout
        self._settle(new)

    def _settle(self, pipelines: Iterable[Pipeline]) -> None:
        for pipeline in pipelines:
            self._home |= dict.fromkeys(pipeline, _order(pipeline))


def _order(pipeline: Pipeline) -> tuple[int, int]:
    return len(pipeline), min(pipeline)


def _first(places: Iterable[int], without: set[int], count: int) -> set[int]:
    found: set[int] = set()
    for place in places:
        if len(found) == count:
            break
        if place not in without:
            found.add(place)
    return found
