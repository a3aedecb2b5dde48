"""Hugging Face Accelerate: `ElasticAccelerator`, an `Accelerator` whose loops go on after a failure.

    def train(job):
        accelerator = ElasticAccelerator(job, gradient_accumulation_steps=2)  # was: Accelerator(...)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for epoch in accelerator.epochs(3):  # was: range(3)
            for batch in accelerator.batches(loader):  # was: loader
                ...

The body of the loop is as it was. When one ends in which gradients were synchronised, a step is complete,
and all that was prepared or registered (`register_for_checkpointing`) goes into peers' memory: models,
optimizers, schedulers, the scaler of gradients, the position of the accumulation, the random numbers, and
where the loop stands in its data. Called again, the two generators go on there: a part of an epoch is made
up for, and if its last batch was done, what follows the batches in that epoch is run again.

Accelerate keeps who it is in singletons for the life of the process; they are made anew with each
generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.adapters.cursor import Place, place_in, require_world

if find_spec("datasets"):
    # Of several ranks each imports it when it prepares its first loader, for most of a second: a process that
    # takes a lost one's place has it from where it was preloaded.
    import_module("datasets")


class ElasticAccelerator(Accelerator):
    """``checkpointer``: `PeerCheckpointer(job)` where it is None. ``state``: what else must come back (a copy
    with averaged weights, a counter), as for `PeerCheckpointer.step`. ``options``: those of `Accelerator`.

    Raises:
        UserError: Accelerate does not take the job's process group.
    """

    def __init__(
        self,
        job: Any,
        checkpointer: PeerCheckpointer | None = None,
        state: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        super().__init__(**options)
        if (self.num_processes, self.process_index) != (job.world, job.rank):
            raise UserError(
                f"Accelerator: it is process {self.process_index} of {self.num_processes}, the job has rank "
                f"{job.rank} of {job.world}; cpu=True is needed where there are no GPUs"
            )
        self._job, self._checkpointer = job, checkpointer or PeerCheckpointer(job)
        self._more, self._stand = state or {}, _Stand(self)
        self._restored = False

    def epochs(self, count: int) -> Iterator[int]:
        """As ``range(count)``, from the epoch on in which the state was saved."""
        self._restore()
        for epoch in range(self._stand.epoch, count):
            yield epoch
            self._stand.epoch = epoch + 1

    def batches(self, loader: Any) -> Iterator[Any]:
        """What ``loader``, which was prepared, still has to give in this epoch. Once an epoch, and for
        training only: each step that is complete when the next batch is asked for is saved.

        Raises:
            MembershipChanged: the membership changed.
            UserError: the state cannot be saved; ``loader`` is not a prepared `DataLoader`.
        """
        self._restore()
        stand, cursor = self._stand, place_in(loader)
        if cursor is None:
            raise UserError(f"batches: a {type(loader).__name__} is not accepted; a prepared DataLoader is")
        due, stand.due = stand.due, None
        stand.cursor, stand.batches_done = cursor, 0
        if due is not None:
            loader.iteration, stand.batches_done = due["iteration"], due["place"]["seen"]
            cursor.go_to(due["place"])
            loader.skip_batches = 0 if cursor.skips else stand.batches_done
        stand.iteration = loader.iteration
        for batch in loader:
            cursor.settle()
            yield batch
            stand.batches_done += 1
            if self.sync_gradients:
                step, stand.steps = stand.steps, stand.steps + 1
                self._checkpointer.step(step, self._state())
                self._job.step(step, lr=float(self._optimizers[0].param_groups[0]["lr"]))
        cursor.settle()
        loader.iteration, loader.skip_batches = stand.iteration + 1, 0

    def end_training(self) -> None:
        """As Accelerate's, but the process group is `elastic.run`'s and stays."""
        for tracker in self.trackers:
            tracker.finish()

    def _restore(self) -> None:
        if not self._restored:
            self._checkpointer.restore(self._state())
            self._restored = True

    def _state(self) -> dict[str, Any]:
        named = {
            "model": self._models,
            "optimizer": [optimizer.optimizer for optimizer in self._optimizers],
            "scheduler": [scheduler.scheduler for scheduler in self._schedulers],
            "scaler": [self.scaler] if self.scaler is not None else [],
            "registered": self._custom_objects,
        }
        state = {f"{name}{i}": item for name, group in named.items() for i, item in enumerate(group)}
        return {**state, "stand": self._stand, **self._more}


class _Stand:
    """Where the loop stands; a part of the state."""

    def __init__(self, accelerator: ElasticAccelerator) -> None:
        self.epoch = self.steps = self.batches_done = self.iteration = 0
        self.cursor: Any = None
        self.due: Place | None = None  # where the next epoch of the loader goes on
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {
            "world": self._accelerator.num_processes,
            "epoch": self.epoch,
            "steps": self.steps,
            "accumulated": self._accelerator.step,
            "iteration": self.iteration,
            "place": self.cursor.place(self.batches_done),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_world(state["world"], self._accelerator._job)
        self.epoch, self.steps, self.due = state["epoch"], state["steps"], state
        self._accelerator.step = state["accumulated"]
