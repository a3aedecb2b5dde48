"""``windtunnel network``: networks that are shared, planned and emulated."""

from windtunnel.cli import new_group

_VERBS = (
    "probe", "run", "aggregation", "sharing", "multicast", "torus", "hostrate", "mobilerate", "dag",
)  # fmt: skip
group = new_group(
    "Networks that are shared: by whom, in which order, and what that costs.",
    {verb: f"network.{verb}" for verb in _VERBS},
)
