"""How far the script is run as a rank: to the end of its period, and to its own end where that is near.

A loop of a thousand steps is left after the first step that repeats. But a later step may be another, and
save, evaluate, or talk to other islands. So the first rank is run on from its steady step, by two steps as
they are and by more without the work in them (`Ahead`). Where one of these is another than the steady one
tells, the rank is run again up to there and a period further, and the steps that then repeat are those of
all ranks.

A script of three steps also has an end, and there a rank may call what the others do not: one barrier more,
one step more. If the script ends within the two steps, all ranks are run on and what they call is compared to
the end; if it does not, or fails there, nothing of this counts.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.graph import OUTLINED, Note, NoteKind, Slice
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.patches import replaces
from windtunnel.training.emulate.live.progress import source_nodes
from windtunnel.training.emulate.live.session import CaptureRequest
from windtunnel.training.emulate.program import find_period

FURTHER = 2
"""Steps that are run at most as they are beyond those that were needed to see the period."""
LENGTH = 3
"""A run is left when it is this many times as long, in events, as it was at the end of the steady step."""
SELDOM = "what comes seldomer than the steps that are looked at is not in the report"
UNEVEN = (
    "Join: every rank is taken to have inputs left; what one without does, and what follows the Join, is"
    " not emulated"
)


@dataclass
class Ending:
    """``write`` keeps a slice, ``leave`` ends the process."""

    request: CaptureRequest
    observer: Observer
    write: Callable[[Slice], None]
    leave: Callable[[], None]
    _slice: Slice | None = None
    _events: int = 0
    _ahead: Ahead | None = None
    _varies: int = 0

    @property
    def following(self) -> bool:
        """The period is over."""
        return self._slice is not None

    @property
    def skipping(self) -> bool:
        """The script runs on without the work of its steps."""
        return self._ahead is not None and self._ahead.begin > 0

    def step(self) -> None:
        """At the end of a step."""
        if self._slice is not None:
            self._follow(self._slice)
            return
        kinds, request = self.observer.kinds, self.request
        least, steps, settled = request.least, request.steps, request.settled
        if least and len(kinds) == 2:
            self._limit(steps * self.observer.steps[-1][1])
        period = find_period(kinds)
        repeated = period.repeats and len(kinds) >= least + period.length
        if not (len(kinds) == settled[0] if settled else repeated or len(kinds) >= steps):
            return
        if least or (request.further and not request.to_end):
            for place, every in seldom(sys._getframe(), steps):
                self.observer.note(SELDOM, of=f"{place}, once in {every}")
        slice_ = self.observer.slice()
        ends = bool(least) or not request.further
        if ends or not request.to_end:  # else it is written when the script has ended, with what follows
            self.write(slice_)
        if ends:
            self.leave()
        self._slice, self.observer.only_kinds = slice_, True
        self._limit(LENGTH * len(slice_.events))
        if not request.to_end:
            self._ahead = Ahead(self.observer)

    def _follow(self, slice_: Slice) -> None:
        kinds, ahead = self.observer.kinds, self._ahead
        if ahead and ahead.differs(slice_.period):
            # The first of its kind may have set-up of its own, which without the work does not show.
            again = self._varies and kinds[ahead.begin :].count(kinds[-1]) > 2
            self._varies = self._varies if again else len(kinds)
        if ahead and self._until(slice_) <= len(kinds) < self.request.steps:
            if not self.skipping:
                self._limit(self.request.steps * len(slice_.events))
                ahead.skip()
        elif len(kinds) >= self._until(slice_):
            self._left()

    def _until(self, slice_: Slice) -> int:
        """Steps after which it is no longer looked whether the script comes to its end."""
        return len(slice_.steps) + slice_.period + FURTHER

    def _limit(self, events: int) -> None:
        if not self._events:
            register_module_forward_pre_hook(self._module)
        self._events = events

    def _module(self, module: Any, args: Any) -> None:
        if self.observer.native.wt_event_count() <= self._events:
            return
        if self._slice is None:
            self.observer.note(f"step {len(self.observer.steps) + 1} is left out: it is longer than"
                               f" {self.request.steps} others")  # fmt: skip
            self.write(self.observer.slice())
        elif self.skipping:
            self.failed("they are too long")
        elif self._ahead:
            self._varies = len(self.observer.kinds) + 1
        self._left()

    def marked(self) -> None:
        """The program says for the first time that a step ends, after others had ended."""
        self.write(replace(self._slice or self.observer.slice(), varies=1, marked=True))
        self.leave()

    def failed(self, why: str) -> None:
        """The script cannot be run on."""
        assert self._slice is not None
        if self._varies:
            self.write(replace(self._slice, varies=self.request.steps))
            return
        note = Note(
            f"what the script does after {len(self.observer.steps)} steps is not in the report: {why}"
            + " (without what its modules compute; --steps runs more steps as they are)" * self.skipping
        )
        self.write(replace(self._slice, notes=[*self._slice.notes, note]))

    def install(self) -> None:
        """Hear of steps, and leave where a rank comes to the end of a ``Join``. Call once, before the script
        runs."""
        self.observer.on_step, self.observer.on_mark = self.step, self.marked

        @replaces(Join, "__enter__")
        def enter(_: Any, context: Any) -> None:
            if context._enable:
                self.observer.note(UNEVEN, NoteKind.APPROXIMATION)

        @replaces(Join, "__exit__")
        def exit(leave: Any, context: Any, kind: Any, *error: Any) -> Any:
            if context._enable and kind is None:
                if self._slice is None:
                    self.observer.program_ended()
                    self.write(self.observer.slice(whole=True))
                self.leave()
            return leave(context, kind, *error)

    def ended(self) -> None:
        """The script has come to its end."""
        if self._slice is None:
            period = find_period(self.observer.kinds)
            near = len(self.observer.kinds) < period.end + period.length + FURTHER
            # The other ranks stop at the end of a period that repeats: so does this one.
            slice_ = self.observer.slice(whole=near and not period.repeats)
            slice_ = self._followed(slice_) if near and period.repeats else slice_
            self.write(replace(slice_, ended=near))
        elif not self.skipping:
            self.write(replace(self._followed(self._slice), ended=True))
        elif self._varies:
            self.write(replace(self._slice, varies=self._varies))

    def _left(self) -> None:
        if self._slice is not None and (self.request.to_end or self._varies):
            slice_ = self._followed(self._slice) if self.request.to_end else self._slice
            self.write(replace(slice_, varies=self._varies))
        self.leave()

    def _followed(self, slice_: Slice) -> Slice:
        events = self.observer.events(len(slice_.events))
        collectives, groups = self.observer.calls()
        return replace(
            slice_, collectives=collectives, groups=groups, world_groups=list(self.observer.world.groups),
            call_sites=self.observer.call_sites, after=events[np.isin(events["kind"], OUTLINED)],
        )  # fmt: skip


OPTIMIZERS = (
    "adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd",
)  # fmt: skip
"""Modules of ``torch.optim``, and the functions in them that do the work."""
CALLS = 100_000
"""Of modules that are skipped at most, where no step ends any more."""


class Ahead:
    """Later steps at little cost: the script runs on, and what its modules compute is not computed again.

    Whether a step is another than those before it is decided by the script between its steps: it counts them,
    and then saves, evaluates, or sends what it has gathered. For that to be seen nothing need be computed. So
    a call of a module returns what the like call of an earlier step returned, a backward pass leaves the
    gradients that were there, and PyTorch's own optimisers change nothing. All else runs as it is and is
    recorded, so steps that differ have other events. What is recorded here is compared with nothing but
    itself.

    Remembers what calls of modules return from now on, and from `skip` on returns it. ``begin``: the steps
    that had ended then, 0 before."""

    def __init__(self, observer: Observer) -> None:
        self.observer, self.begin, self.skipped = observer, 0, 0
        self._returned: dict[Any, Any] = {}
        self._gradients: dict[Any, Any] = {}
        replaces(torch.nn.Module, "__call__")(self._called)
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
        replaces(torch.autograd, "_engine_run_backward")(self._backward)
        for name in OPTIMIZERS:
            setattr(import_module(f"torch.optim.{name}"), name, lambda *args, **kwargs: None)

    def _called(self, call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.observer.inside:
            return call(module, *args, **kwargs)
        key = (id(module), module.training, torch.is_grad_enabled(), *map(_kind, tree_leaves((args, kwargs))))
        if not self.begin or key not in self._returned:
            self._returned[key] = call(module, *args, **kwargs)
        self.skipped += self.begin > 0
        if self.skipped > CALLS:
            raise RuntimeError("no step ends")
        return self._returned[key]

    def _remember(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.begin:
            with_gradient = (
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            )
            self._gradients |= {p: p.grad for p in with_gradient}

    def _backward(
        self, _: Any, outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if not kwargs["accumulate_grad"]:
            self.observer.native.wt_record_on(0)
            tensors = tuple(torch.zeros_like(tensor, requires_grad=create) for tensor in inputs)
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


NAMES = (ast.Name, ast.Attribute, ast.Constant, ast.Load)


def seldom(frame: FrameType | None, steps: int) -> Iterator[tuple[str, int]]:
    """The tests of a remainder (``if step % every == 0``) in the user's functions that run, where the divisor
    is known and greater than ``steps``: their places and divisors."""
    while frame is not None:
        code = frame.f_code
        lines = {line for _, _, line in code.co_lines()}
        nodes = source_nodes(code.co_filename) if failure.is_own(code.co_filename) else []
        tests = [node.test for node in nodes if isinstance(node, ast.If) and node.lineno in lines]
        for part in (part for test in tests for part in ast.walk(test)):
            if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Mod):
                continue
            every = None
            if all(isinstance(operand, NAMES) for operand in ast.walk(part.right)):
                with contextlib.suppress(Exception):
                    divisor = compile(ast.Expression(part.right), "", "eval")
                    every = eval(divisor, frame.f_globals, frame.f_locals)
            if type(every) is int and every > steps:
                yield failure.name_place(code.co_filename, part.lineno, code.co_name), every
        frame = frame.f_back
