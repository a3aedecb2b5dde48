"""The p-shuffle: which racks a splitter feeds, and who can relay in another's place.

k columns of p^k racks, N = k * p^k. The transmit port of rack (c, i) feeds a passive 1:p splitter, whose
outputs go to the racks (c + 1 mod k, (p * i mod p^k) + j) with j below p. Racks of a column with equal
i mod p^(k-1) feed the same racks: they are a *relay group* of p, any of which can do for the others, and each
rack has one feeding group, with a receive port for each of its members.

Source: Das et al., Shufflecast, ToN'22 (arXiv:2104.09680); the construction is ShuffleNet's.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.base.errors import UserError


@dataclass(frozen=True)
class Shuffle:
    """Racks are numbered column by column. ``p``: outputs of a splitter; ``k``: columns."""

    p: int
    k: int

    @property
    def column(self) -> int:
        """Racks of a column."""
        return self.p**self.k

    @property
    def racks(self) -> int:
        return self.k * self.column

    @property
    def groups(self) -> int:
        """Relay groups, each of p racks: as many transmissions reach every rack."""
        return self.racks // self.p

    def fed_by(self, rack: int) -> range:
        """The racks that the splitter of ``rack`` feeds."""
        column, place = divmod(rack, self.column)
        first = (column + 1) % self.k * self.column + self.p * place % self.column
        return range(first, first + self.p)

    def group(self, rack: int) -> int:
        """The relay group of ``rack``, a number below `groups`."""
        column, place = divmod(rack, self.column)
        return column * (self.column // self.p) + place % (self.column // self.p)

    def members(self, group: int) -> range:
        """The racks of a relay group."""
        column, place = divmod(group, self.column // self.p)
        return range(column * self.column + place, (column + 1) * self.column, self.column // self.p)

    def feeding_group(self, rack: int) -> int:
        """The only group whose members feed ``rack``."""
        column, place = divmod(rack, self.column)
        return (column - 1) % self.k * (self.column // self.p) + place // self.p


def shuffle_of(racks: int, splitter: int) -> Shuffle:
    """The shuffle of ``racks`` with splitters of that many outputs.

    Raises:
        UserError: there is none of that size; the nearest ones are named.
    """
    if splitter < 2:
        raise UserError(f"splitter: {splitter} outputs, accepted are 2 or more")
    k = 1
    while (k + 1) * splitter ** (k + 1) <= racks:
        k += 1
    shuffle = Shuffle(splitter, k)
    if shuffle.racks == racks:
        return shuffle
    sizes = [shuffle.racks, Shuffle(splitter, k + 1).racks]
    if racks < shuffle.racks:
        sizes = sizes[:1]
    raise UserError(
        f"racks: {racks} do not fit splitters of {splitter}, which need k * {splitter}^k racks; the "
        f"nearest accepted are {' and '.join(map(str, sizes))}"
    )
