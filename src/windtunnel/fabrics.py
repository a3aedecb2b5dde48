"""Which fabric of a cluster another capability prices: no capability imports the twin of another.

`alternatives` is what `emulate` and `sweep` give an emulation. A fabric is a name in ``Cluster.fabrics``, or
the switches that are at hand when they add; and a function of its capability's twin that makes an
`Alternative` of the cluster.
"""

from __future__ import annotations

from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.graph import Alternative
from windtunnel.training.emulate.options import Options

NOTHING = Options()


def alternatives(cluster: Cluster, options: Options = NOTHING) -> tuple[Alternative, ...]:
    """The ways besides NCCL's that ``cluster`` has for some collectives, and that ``options`` ask for.

    Raises:
        UserError: such a fabric cannot be planned, or switches have no such policy or fewer jobs.
    """
    ways = []
    if "optical-torus" in cluster.fabrics:
        from windtunnel.network.torus.twin import alternative

        ways.append(alternative(cluster))
    if "shufflecast" in cluster.fabrics:
        from windtunnel.network.multicast.twin import fabric as splitters

        ways.append(splitters.alternative(cluster))
    if options.aggregation != "none" or options.neighbours:
        from windtunnel.network.aggregation.twin import fabric

        ways += fabric.alternatives(cluster, options.aggregation, options.neighbours)
    return tuple(ways)
