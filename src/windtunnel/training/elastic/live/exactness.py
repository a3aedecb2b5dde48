"""What can be seen, in a process that trains, of what keeps its results from being the same each time."""

from __future__ import annotations

import torch
import torch.distributed as dist

from windtunnel.training.elastic.live import buckets

# States of DDP's communication hooks that change nothing from step to step.
_STATELESS = ("_AllreduceUpcastHookState", "MixedPrecisionPolicy")


def doubts() -> list[str]:
    """Sentences, each of which says why a step that is done again may give other bits; as far as it is seen
    now."""
    reasons = []
    fixed = torch.are_deterministic_algorithms_enabled()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if cuda and not fixed:
        reasons.append("kernels of CUDA may sum in any order (torch.use_deterministic_algorithms is not on)")
    if cuda and torch.backends.cudnn.benchmark and not fixed:
        reasons.append("torch.backends.cudnn.benchmark chooses kernels by how long they take")
    if not cuda and not fixed and torch.get_num_threads() > 1:
        reasons.append(
            f"{torch.get_num_threads()} threads of an operator may add up in any order "
            "(torch.use_deterministic_algorithms is not on)"
        )
    for replica in buckets.replicas():
        if getattr(replica, "_has_rebuilt_buckets", False) or replica._use_python_reducer:
            reasons.append("DDP sorts its gradients by the time at which they come")
        for hook, state in getattr(replica, "_comm_hooks", ()):
            if state is not None and not isinstance(state, dist.ProcessGroup):
                kind = type(state).__name__
                if kind not in _STATELESS and not getattr(state, "saved", False):
                    name = getattr(hook, "__name__", kind)
                    reasons.append(f"the {kind} of DDP's communication hook {name} is not saved")
    return list(dict.fromkeys(reasons))
