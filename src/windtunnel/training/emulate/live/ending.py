"""How far the script is run as a rank: to its steady step, and from there to its own end where that is near.

A loop of a thousand steps is left after the first that repeats. But a script of three steps also has an end,
and there a rank may call what the others do not: one barrier more, one step more. So the first rank is run on
from its steady step, by two more at most. If the script ends there, all ranks are run on and what they call
is compared to the end; if it does not, or fails there, nothing of this counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_pre_hook

from windtunnel.training.emulate.graph import OUTLINED, NoteKind, Slice
from windtunnel.training.emulate.live.observe import Observer

FURTHER = 2
"""Steps that are run at most beyond those that were needed to see the steady one."""
LENGTH = 3
"""A run is left when it is this many times as long, in events, as it was at the end of the steady step."""
UNEVEN = (
    "Join: every rank is taken to have inputs left; what one without does, and what follows the Join, is"
    " not emulated"
)


@dataclass
class Ending:
    """``further``: the script is run on from its steady step. ``to_end``: another rank came to its end, so
    what this one calls counts wherever it is left. ``write`` keeps a slice, ``leave`` ends the process."""

    further: bool
    to_end: bool
    write: Callable[[Slice], None]
    leave: Callable[[], None]
    observer: Observer = field(init=False)
    _slice: Slice | None = None
    _events: int = 0

    @property
    def following(self) -> bool:
        """The steady step is over."""
        return self._slice is not None

    def steady(self) -> None:
        """At the end of the steady step."""
        slice_ = self.observer.slice()
        self.write(slice_)
        if not self.further:
            self.leave()
        self._slice, self._events = slice_, LENGTH * len(slice_.events)
        observer = self.observer
        observer.settled = None
        observer.max_steps = len(observer.steps) + FURTHER + self.to_end  # one more than the one that ended
        observer.on_steady = self._step
        register_module_forward_pre_hook(self._module)

    def install(self) -> None:
        """Leave where a rank comes to the end of a ``Join``. Call once, before the script runs."""
        join: Any = Join
        leave = join.__exit__

        def enter(context: Any) -> None:
            if context._enable:
                self.observer.note(UNEVEN, NoteKind.APPROXIMATION)

        def exit(context: Any, kind: Any, *error: Any) -> Any:
            if context._enable and kind is None:
                if self._slice is None:
                    self.observer.program_ended()
                    self.write(self.observer.slice())
                self.leave()
            return leave(context, kind, *error)

        join.__enter__, join.__exit__ = enter, exit

    def ended(self) -> None:
        """The script has come to its end."""
        if self._slice is None:
            self.write(replace(self.observer.slice(), ended=True))
        else:
            self.write(replace(self._followed(self._slice), ended=True))

    def _step(self) -> None:
        if len(self.observer.steps) >= self.observer.max_steps:
            self._left()

    def _module(self, module: Any, args: Any) -> None:
        if self.observer.native.wt_event_count() > self._events:
            self._left()

    def _left(self) -> None:
        if self.to_end and self._slice is not None:
            self.write(self._followed(self._slice))
        self.leave()

    def _followed(self, slice_: Slice) -> Slice:
        events = self.observer.events(len(slice_.events))
        collectives, groups = self.observer.calls()
        return replace(
            slice_, collectives=collectives, groups=groups, world_groups=list(self.observer.world.groups),
            call_sites=self.observer.call_sites, after=events[np.isin(events["kind"], OUTLINED)],
        )  # fmt: skip
