"""What the agent gives a worker in its environment."""

from __future__ import annotations

import os
from pathlib import Path

from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.model import Membership


def environment(
    config: AgentConfig, member: Membership, door: Path, rank: int, place: int | None
) -> dict[str, str]:
    """The environment of a worker: as torchrun's, so that ``env://`` works, and ours."""
    host, _, port = member.store.rpartition(":")
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **config.env,
        "RANK": str(rank),
        "WORLD_SIZE": str(member.world),
        "LOCAL_RANK": str(rank % member.per_host),
        "LOCAL_WORLD_SIZE": str(member.per_host),
        "GROUP_RANK": str(place),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(member.generation),
        "TORCHELASTIC_RUN_ID": f"{Path(config.run).name}/{member.prefix}",
        "WINDTUNNEL_AGENT": f"unix:{door}",
        "WINDTUNNEL_RUN": config.run,
        "WINDTUNNEL_PREFIX": f"{member.prefix}/env",
    }
