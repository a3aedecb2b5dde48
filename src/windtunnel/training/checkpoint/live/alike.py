"""State that all ranks hold alike, as the replicas of DDP do: found by agreement on its content.

Such tensors need no copies in other hosts' memory: they are there. Only modules' and optimizers' tensors
count; what lies beside them, such as generators' states, may be equal by chance.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from windtunnel.training.checkpoint.live import snapshot
from windtunnel.training.checkpoint.live.state import State, local


def agree_alike(
    job: Any, program: State, tensors: snapshot.Tensors, before: frozenset[str] | None, key: str
) -> frozenset[str] | None:
    """Names of the tensors that are equal on all ranks now. All ranks call it; ``key`` is its own.

    ``before``: what was found last, None for the first time: names only ever leave the set. The first time,
    None where they make up less than an eighth of the state: a shard of its own is not worth it.
    """
    if before is None:
        kinds = (nn.Module, Optimizer)
        replicas = tuple(f"{item}/" for item, value in program.items() if isinstance(value, kinds))
        candidates = [(name, tensor) for name, tensor in tensors if name.startswith(replicas)]
    else:
        candidates = [(name, tensor) for name, tensor in tensors if name in before]
    prints = snapshot.fingerprints(candidates)
    said = job.agree(f"alike/{key}", prints)
    alike = frozenset(n for n, p in prints.items() if all(other.get(n) == p for other in said.values()))
    if before is not None:
        left = sorted(before - alike)
        if left and job.rank == 0:
            text = f"{left[0]} was equal on all ranks and is not any more ({len(left)} tensors in all)"
            job.event("note", text=text + "; it is saved for each rank from now on")
        return alike
    sizes = {name: local(tensor).numel() * local(tensor).element_size() for name, tensor in tensors}
    much = 8 * sum(sizes[name] for name in alike) >= sum(sizes.values())
    weights = job.agree(f"alike-share/{key}", bool(alike) and much)
    return alike if all(weights.values()) else None
