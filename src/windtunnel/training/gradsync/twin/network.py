"""What collectives take on a cluster: lines through the times of the emulator's model."""

from __future__ import annotations

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.calibration.fit import least_squares
from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.gradients import collective_times
from windtunnel.training.gradsync.model import CollectiveCost, Kind, Network, Scope

KINDS: dict[Kind, str] = {
    "allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "allgather": "all_gather",
    "alltoall": "all_to_all",
}  # fmt: skip
SIZES = tuple(1 << shift for shift in range(12, 28, 2))


def network_of(cluster: Cluster) -> Network:
    """All collectives that an option may use.

    Raises:
        UserError: the cluster has one rank.
    """
    if cluster.world_size == 1:
        raise UserError(f"cluster {cluster.name}: it has one rank; two or more synchronise gradients")
    places = cluster.devices_per_host
    members: dict[Scope, list[int]] = {
        "flat": [*range(cluster.world_size)],
        "inside": [*range(places)],
        "between": [*range(0, cluster.world_size, places)],
    }
    found = [
        _cost(cluster, scope, kind, ranks)
        for scope, ranks in members.items()
        if len(ranks) > 1
        for kind in KINDS
    ]
    return Network(cluster.hosts, places, tuple(found))


def _cost(cluster: Cluster, scope: Scope, kind: Kind, ranks: list[int]) -> CollectiveCost:
    times = np.array(collective_times(cluster, KINDS[kind], ranks, SIZES, alike=scope == "between"))
    sizes = np.array(SIZES, float)
    fixed, per_byte = least_squares([np.ones_like(sizes), sizes], times)
    return CollectiveCost(scope, kind, fixed, per_byte)
