"""``windtunnel network``: networks that are shared, planned and emulated."""

from windtunnel.cli import new_group

_VERBS = (
    "probe", "run", "aggregation", "sharing", "multicast", "torus", "hostrate", "mobilerate", "dag",
)  # fmt: skip
group = new_group(
    "Shared networks: bandwidth shares, in-network aggregation, multicast, routing and scheduling.",
    {verb: f"network.{verb}" for verb in _VERBS},
)
