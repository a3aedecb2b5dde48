"""Checkpoints in the memory of peers (GEMINI, Wang et al., SOSP 2023).

Every step each rank's state goes to a slot in its own host's memory, and from there, agent to agent, into
the memory of other hosts. A failed job goes on from the newest step of which every shard has a verified
copy.

    from windtunnel.training.checkpoint import PeerCheckpointer
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.training.checkpoint.live.checkpointer import PeerCheckpointer

__all__ = ["PeerCheckpointer"]


def __getattr__(name: str) -> Any:
    # Late, since the agents import this package and must not wait for torch.
    if name == "PeerCheckpointer":
        from windtunnel.training.checkpoint.live.checkpointer import PeerCheckpointer

        return PeerCheckpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
