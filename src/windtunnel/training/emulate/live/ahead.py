"""Later steps at little cost: the script runs on, and what its modules compute is not computed again.

Whether a step is another than those before it is decided by the script between its steps: it counts them, and
then saves, evaluates, or sends what it has gathered. For that to be seen nothing need be computed. So a call
of a module returns what the like call of an earlier step returned, a backward pass leaves the gradients that
were there, and PyTorch's own optimisers change nothing. All else runs as it is and is recorded, so steps that
differ have other events. What is recorded here is compared with nothing but itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.live.observe import Observer

OPTIMIZERS = (
    "adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd",
)  # fmt: skip
"""Modules of ``torch.optim``, and the functions in them that do the work."""
CALLS = 100_000
"""Of modules that are skipped at most, where no step ends any more."""


class Ahead:
    """Remembers what calls of modules return from now on, and from `skip` on returns it. ``begin``: the steps
    that had ended then, 0 before."""

    def __init__(self, observer: Observer) -> None:
        self.observer, self.begin, self.skipped = observer, 0, 0
        self._returned: dict[Any, Any] = {}
        self._gradients: dict[Any, Any] = {}
        self._call = torch.nn.Module.__call__
        torch.nn.Module.__call__ = lambda module, *args, **kwargs: self._called(module, args, kwargs)  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(self._remember)

    def differs(self, length: int) -> bool:
        """Whether the last step is another than the one before it by a period of this length. The first ones
        without their work can only be seen to do more."""
        observer = self.observer
        if not self.begin or len(observer.kinds) > self.begin + length:
            return observer.kinds[-1] != observer.kinds[-1 - length]
        return not observer.rows(*observer.steps[-1]) <= observer.rows(*observer.steps[self.begin - length])

    def skip(self) -> None:
        """From here on nothing is computed."""
        self.begin = len(self.observer.steps)
        autograd: Any = torch.autograd
        self._engine = autograd._engine_run_backward
        autograd._engine_run_backward = self._backward
        for name in OPTIMIZERS:
            setattr(import_module(f"torch.optim.{name}"), name, lambda *args, **kwargs: None)

    def _called(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self.observer.inside:
            return self._call(module, *args, **kwargs)
        key = (id(module), module.training, torch.is_grad_enabled(), *map(_kind, tree_leaves((args, kwargs))))
        if not self.begin or key not in self._returned:
            self._returned[key] = self._call(module, *args, **kwargs)
        self.skipped += self.begin > 0
        if self.skipped > CALLS:
            raise RuntimeError("no step ends")
        return self._returned[key]

    def _remember(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.begin:
            held = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            self._gradients |= {p: p.grad for p in held}

    def _backward(
        self, outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not kwargs["accumulate_grad"]:
            self.observer.native.wt_record_on(0)
            tensors = tuple(torch.zeros_like(one, requires_grad=create) for one in inputs)
            self.observer.native.wt_record_on(1)
            return tensors
        for parameter, gradient in self._gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
        return ()


def _kind(value: Any) -> Any:
    """What an argument is to a call that may be like another."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return value if isinstance(value, bool | str | None) else type(value)
