"""The rivals of the paper: whole tables, one after the other, on the device that has least so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.base.units import size
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.policy.pieces import Ints, Pieces

ORDERS: Mapping[str, Callable[[EmbeddingTable], float]] = {
    "size": lambda table: table.rows * table.dim,
    "lookup": lambda table: table.lookups * table.dim,
    "size-lookup": lambda table: table.lookups * table.dim * math.log10(max(table.rows, 10)),
}


def assign(cut: Pieces, devices: int, policy: str) -> tuple[Ints, Ints]:
    """Of each table its device, and its fast rows: all or none.

    Raises:
        UserError: no device has room for a table whole.
    """
    weights = np.array([ORDERS[policy](table) for table in cut.tables])
    sums = np.zeros(devices)
    rooms = {True: np.full(devices, cut.fast.capacity), False: np.full(devices, cut.backing.capacity)}
    assigned, rows = np.zeros(len(cut), int), np.zeros(len(cut), int)
    for place in np.argsort(-weights, kind="stable"):
        for fast, room in rooms.items():
            fits = room >= cut.total[place]
            if fits.any():
                device = int(np.where(fits, sums, np.inf).argmin())
                room[device] -= cut.total[place]
                sums[device] += weights[place]
                assigned[place], rows[place] = device, cut.tables[place].rows if fast else 0
                break
        else:
            raise UserError(
                f"policy {policy} places tables whole: no device has {size(float(cut.total[place]))} left for"
                f" table {cut.tables[place].name} in fast or in slow memory"
            )
    return assigned, rows
