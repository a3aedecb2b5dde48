"""Who holds what of which step, as far as this host's own ranks are concerned, and what all ranks have
agreed on.

A rank's step is *done* when each of its shards has reached all the hosts that are to hold it; that is posted,
and when every rank has posted, the step is committed. What is posted says which hosts hold each shard, so
from then on every host can tell how many copies of each are left when hosts are lost. Plain data, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

Holders = dict[str, list[int]]
"""Shard: ids of the hosts that hold a verified copy."""


@dataclass
class _Shard:
    has: set[int]
    lacks: set[int]


@dataclass
class Ledger:
    """``steps[rank][step][shard]``: where its copies are and where they are still to go."""

    _steps: dict[tuple[int, int], dict[str, _Shard]] = field(default_factory=dict)
    _posted: set[tuple[int, int]] = field(default_factory=set)

    def saved(self, rank: int, step: int, shard: str, host: int, wanted: Iterable[int]) -> None:
        """``host`` (this one) has ``shard``; the hosts ``wanted`` are to get it."""
        self._steps.setdefault((rank, step), {})[shard] = _Shard({host}, set(wanted) - {host})
        # Only the newest steps of a rank can still be committed.
        for old in [key for key in self._steps if key[0] == rank and key[1] < step - 8]:
            del self._steps[old]

    def arrived(self, rank: int, step: int, shard: str, host: int) -> None:
        """``host`` has verified its copy."""
        entry = self._steps.get((rank, step), {}).get(shard)
        if entry is not None:
            entry.lacks.discard(host)
            entry.has.add(host)

    def done(self, rank: int, step: int, shards: Collection[str]) -> Holders | None:
        """Who holds the rank's ``shards``, the first time that all of them are where they are to be; else
        None."""
        entries = self._steps.get((rank, step), {})
        if (rank, step) in self._posted or not set(shards) <= entries.keys():
            return None
        if any(entries[shard].lacks for shard in shards):
            return None
        self._posted.add((rank, step))
        return {shard: sorted(entries[shard].has) for shard in shards}

    def missing(self) -> int:
        """Copies that are still to arrive."""
        return sum(len(entry.lacks) for shards in self._steps.values() for entry in shards.values())


def merged(values: Iterable[Mapping[str, Iterable[int]]]) -> dict[str, frozenset[int]]:
    """The holders that all ranks posted, together."""
    found: dict[str, frozenset[int]] = {}
    for value in values:
        for shard, hosts in value.items():
            found[shard] = found.get(shard, frozenset()) | frozenset(hosts)
    return found


def replication(holders: Mapping[str, Collection[int]], alive: Collection[int]) -> int:
    """Fewest copies that any shard has on the hosts ``alive``; 0 where nothing is known."""
    return min((len(set(hosts) & set(alive)) for hosts in holders.values()), default=0)
