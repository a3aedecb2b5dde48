"""Gradient synchronisation on clusters that are not there.

`profile_of` makes the profile of an emulated job: its gradients as its backward makes them, the cluster's
collectives, and codecs as the cluster's devices would run them. The plan that is made on it is priced by the
timeline that made it.
"""

from __future__ import annotations

from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.gradients import backward_of
from windtunnel.training.gradsync.model import GradientTensor, SyncProfile
from windtunnel.training.gradsync.policy import Decision, Observation
from windtunnel.training.gradsync.twin.costs import codecs_of, network_of

__all__ = ["cost", "profile_of"]


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """``seconds`` of an iteration with a plan, those ``to_loss``, and ``bytes`` that a rank sends."""
    ours = decision.forecasts[0]
    return {"seconds": ours.seconds, "to_loss": ours.to_loss, "bytes": float(ours.nbytes)}


def profile_of(result: EmulationResult) -> SyncProfile:
    """Of the job and the cluster of an emulation.

    Raises:
        UserError: the job makes no gradients, or its cluster has one rank.
    """
    backward, cluster = backward_of(result), result.cluster
    return SyncProfile(
        tensors=tuple(
            GradientTensor(gradient.name, gradient.numel, gradient.seconds) for gradient in backward.gradients
        ),
        codecs=codecs_of(cluster),
        network=network_of(cluster),
        forward=backward.before,
        after=backward.after,
        emulated=f"{result.program.name} on {cluster.name}",
    )
