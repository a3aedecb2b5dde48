"""How a gradient that comes as rows of a table is synchronised."""

from __future__ import annotations

from windtunnel.training.gradsync.model import PLAIN, Option, Profile, Tensor
from windtunnel.training.gradsync.policy.options import Task, tasks


def choices(tensor: Tensor, profile: Profile) -> list[tuple[Option, list[Task]]]:
    """The options that a sparse gradient has, with their tasks: as the dense one that it stands for."""
    return [(PLAIN, tasks(PLAIN, tensor.numel, profile))]
