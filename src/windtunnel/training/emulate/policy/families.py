"""Families of process groups: the rows of one mesh dimension, found from the groups alone.

A job of 8,192 ranks has thousands of groups, but they were made by a few series of calls: all tensor-parallel
groups, all pipeline groups, and so on. Groups of one series have one label and one size and share no rank, so
a family is a (partial) partition of the world, and "my group in this family, and my place in it" is what one
rank's graph must be told to become another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.graph import Group, Slice

Index = NDArray[np.int32]


@dataclass(frozen=True)
class Family:
    """Groups of one series.

    ``members[g, i]``: the rank at place i of group g. ``group_of[rank]`` and ``index_of[rank]``: the rank's
    group (row of ``members``) and its place in it, -1 where the rank is in no group of the family.
    ``covers``: every rank is in some group.
    """

    label: str
    size: int
    members: Index
    group_of: Index
    index_of: Index
    covers: bool

    @property
    def name(self) -> str:
        return self.label or "unnamed"


@dataclass(frozen=True)
class Families:
    """All families of a world. ``family_of[g]`` is that of the world's g-th group."""

    world_size: int
    families: list[Family]
    family_of: Index

    def of_slice(self, slice_: Slice) -> list[int]:
        """For each of the slice's groups, its family.

        Groups are found by name and, where names differ between ranks, by label and ranks. Raises
        `ValueError` for a group that is not among the world's.
        """
        by_name = {(group.name, group.ranks): i for i, group in enumerate(slice_.world_groups)}
        by_ranks: dict[tuple[str, tuple[int, ...]], int] = {}
        for i, group in enumerate(slice_.world_groups):
            by_ranks.setdefault((group.label, group.ranks), i)
        found = []
        for group in slice_.groups:
            place = by_name.get((group.name, group.ranks), by_ranks.get((group.label, group.ranks), -1))
            if place < 0:
                raise ValueError(
                    f"group {group.name!r} of rank {slice_.rank} is not among the world's groups"
                )
            found.append(int(self.family_of[place]))
        return found


def find_families(groups: Sequence[Group], world_size: int) -> Families:
    """Sort the world's groups, in the order of their making, into families.

    A group joins the first family of its label and size with which it shares no rank; two meshes over the
    same ranks thus make two families. The cost is the total number of members (33,000 for 8,192 ranks in four
    dimensions) in NumPy, and one Python step a group.
    """
    open_: dict[tuple[str, int], list[int]] = {}
    rows: list[list[int]] = []
    taken: list[NDArray[np.bool_]] = []
    family_of = np.full(len(groups), -1, np.int32)
    arrays = [np.array(group.ranks, np.int32) for group in groups]
    for i, group in enumerate(groups):
        candidates = open_.setdefault((group.label, len(group.ranks)), [])
        place = next((f for f in candidates if not taken[f][arrays[i]].any()), -1)
        if place < 0:
            place = len(rows)
            candidates.append(place)
            rows.append([])
            taken.append(np.zeros(world_size, np.bool_))
        family_of[i] = place
        rows[place].append(i)
        taken[place][arrays[i]] = True
    families = [_family(groups, arrays, chosen, world_size) for chosen in rows]
    return Families(world_size, families, family_of)


def _family(groups: Sequence[Group], arrays: list[Index], chosen: list[int], world_size: int) -> Family:
    members = np.stack([arrays[i] for i in chosen])
    group_of = np.full(world_size, -1, np.int32)
    index_of = np.full(world_size, -1, np.int32)
    group_of[members] = np.arange(len(chosen), dtype=np.int32)[:, None]
    index_of[members] = np.arange(members.shape[1], dtype=np.int32)
    covers = bool((group_of >= 0).all())
    label = groups[chosen[0]].label
    return Family(label, members.shape[1], members, group_of, index_of, covers)
