"""Which fabric of a cluster another capability prices: no capability imports the twin of another.

`alternatives` is what `emulate` and `sweep` give an emulation. A fabric is a name in ``Cluster.fabrics``, and
a function of its capability's twin that makes an `Alternative` of the cluster.
"""

from __future__ import annotations

from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.graph import Alternative


def alternatives(cluster: Cluster) -> tuple[Alternative, ...]:
    """The ways besides NCCL's that ``cluster`` has for some collectives.

    Raises:
        UserError: such a fabric cannot be planned.
    """
    found = []
    if "optical-torus" in cluster.fabrics:
        from windtunnel.network.torus.twin import alternative

        found.append(alternative(cluster))
    return tuple(found)
