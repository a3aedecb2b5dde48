"""Hugging Face's `Trainer`: `ElasticTrainerCallback`, with which ``trainer.train()`` goes on after a failure.

    def train(job):
        trainer = Trainer(...)
        ElasticTrainerCallback(job).attach(trainer)
        trainer.train()

After each optimizer step, with what the trainer logs, evaluates and saves after it, the trainer's state
goes into peers' memory: model, optimizer, scheduler, scaler, `TrainerState`, the states of callbacks, the
loss that is not logged yet, the random numbers, and where it stands in its data. ``save_strategy`` and its
like stay what they are, for what is to be kept on disk.

Callbacks of the trainer are not told enough for that (an epoch is always begun at its first batch), so
`attach` stands in for six of its methods, of this one trainer:

1. `_init_training_state` says in which epoch to begin, and after how many of its batches. The state that
   tells this goes into model and optimizer, too, which the trainer wraps only afterwards; so they are
   wrapped before.
2. `get_train_dataloader` and `_prepare_for_training`: what was made for 1 is given.
3. `_run_epoch` of the epoch that is gone on with skips as it does for a checkpoint on disk. One that was to
   end after its last saved step, by itself or by a callback's word, only runs what follows its steps.
4. `_load_rng_state`: the generators are put by the data's cursor.
5. `_maybe_log_save_evaluate`, the last that is done in a step, is followed by the save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.adapters.cursor import Cursor, place_in, require_world

if find_spec("deepspeed"):
    import_module("deepspeed")  # as the trainer does when it begins, where that would hold up a recovery

_METHODS = (
    "_init_training_state",
    "get_train_dataloader",
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
)
_OWN = ("is_local_process_zero", "is_world_process_zero")  # of the process, not of the run
_LOSS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
_MEMORY = "peers' memory"  # where the trainer would have the path of a checkpoint


class ElasticTrainerCallback(TrainerCallback):
    """``checkpointer``: `PeerCheckpointer(job)` where it is None. ``state``: what else must come back (a copy
    with averaged weights, a counter), as for `PeerCheckpointer.step`."""

    def __init__(
        self, job: Any, checkpointer: PeerCheckpointer | None = None, state: dict[str, Any] | None = None
    ) -> None:
        self._job, self._checkpointer = job, checkpointer or PeerCheckpointer(job)
        self._more = state or {}
        self._loader: Any = None
        self._cursor: Cursor | None = None
        self._prepared: Any = None
        self._restored: dict[str, Any] | None = (
            None  # the trainer's part of what was restored, until it is used up
        )
        self._complete = False  # the optimizer's step; what is done after it may not be
        self._epoch = self._batches_done = 0  # the epoch, and how many of its batches were seen

    def attach(self, trainer: Trainer) -> Trainer:
        """Have ``trainer.train()`` save after each step and go on where the job stands; ``trainer``.

        Raises:
            UserError: this version's trainer has other methods; it takes no part in the job's process
                group, or is told not to go on in the middle of an epoch.
        """
        if missing := [name for name in _METHODS if not hasattr(trainer, name)]:
            raise UserError(f"Trainer has no {missing[0]}; transformers 5.23 and its like are accepted")
        args = trainer.args
        if (args.world_size, args.process_index) != (self._job.world, self._job.rank):
            raise UserError(
                f"TrainingArguments: process {args.process_index} of {args.world_size}, the job has rank "
                f"{self._job.rank} of {self._job.world}; make them in the function that `run` calls, with "
                "use_cpu=True where there are no GPUs"
            )
        if args.ignore_data_skip:
            raise UserError("TrainingArguments: ignore_data_skip=True gives other data after a failure")
        # Accelerate keeps the loaders that are being iterated for the life of the process.
        trainer.accelerator.gradient_state.dataloader_references = [None]
        self._trainer = trainer
        self._plain: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in _METHODS}
        for name in _METHODS:
            setattr(trainer, name, getattr(self, f"_at_{name.removeprefix('_')}"))
        trainer.add_callback(self)
        return trainer

    # -- the trainer's methods, in the order of their calls -----------------------------------------------

    def _at_get_train_dataloader(self) -> Any:
        self._loader = self._plain["get_train_dataloader"]()
        self._cursor = place_in(self._loader)
        return self._loader

    def _at_init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        position: tuple[int, int] = self._plain["_init_training_state"](
            max_steps, updates, epochs, resume, trial
        )
        self._prepared = self._plain["_prepare_for_training"](max_steps, self._loader, resume)
        self._checkpointer.restore(self._state())
        if self._restored is None:
            return position
        self._epoch, self._batches_done = self._restored["epoch"], self._restored["place"]["seen"]
        return self._epoch, self._batches_done

    def _at_prepare_for_training(self, *_: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The loss that is not logged yet: the trainer has just set it to nothing."""
        if self._restored is not None:
            self._trainer._tr_loss += self._restored["loss"]["_tr_loss"]
            for name in _LOSS:
                setattr(self._trainer, name, self._restored["loss"][name])

    def _at_run_epoch(self, *arguments: Any, **named: Any) -> None:
        if arguments:
            raise UserError("Trainer._run_epoch: arguments by position; transformers 5.23 names them")
        restored, self._restored = self._restored, None
        self._epoch = named["epoch"]
        if restored is None:
            from_disk = named["resume_from_checkpoint"] and self._epoch == named["epochs_trained"]
            self._batches_done = named["steps_trained_in_current_epoch"] if from_disk else 0
        else:
            named["resume_from_checkpoint"] = _MEMORY
            control = self._trainer.control
            for name, value in restored["control"].items():
                setattr(control, name, value)
            if control.should_epoch_stop or control.should_training_stop:
                named["num_update_steps_per_epoch"] = 0
            if self._cursor is not None:
                self._cursor.skips = False  # the trainer does
                self._cursor.go_to(restored["place"])
        self._plain["_run_epoch"](**named)

    def _at_load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != _MEMORY:
            self._plain["_load_rng_state"](checkpoint)
        elif self._cursor is not None:
            self._cursor.settle()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A batch of those that are accumulated was seen."""
        self._batches_done += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A batch was seen, and a step is complete but for what the trainer does in `_at_maybe…`."""
        self._batches_done += 1
        self._complete = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The epoch that was gone on with had no batch left."""
        if self._cursor is not None:
            self._cursor.settle()

    def _at_maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        self._plain["_maybe_log_save_evaluate"](*arguments, **named)
        complete, self._complete = self._complete, False
        if not complete:  # the end of an epoch
            return
        trainer = self._trainer
        step = trainer.state.global_step - 1
        self._checkpointer.step(step, self._state())
        logged = trainer.state.log_history[-1] if trainer.state.log_history else {}
        loss = {"loss": logged["loss"]} if logged.get("step") == step + 1 and "loss" in logged else {}
        self._job.step(step, lr=float(trainer._get_learning_rate()), **loss)

    # -- what is saved -------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            "model": trainer.model_wrapped,
            "optimizer": trainer.optimizer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "trainer": self,
            **self._more,
        }
        scaler = trainer.accelerator.scaler
        return state if scaler is None else {**state, "scaler": scaler}

    def state_dict(self) -> dict[str, Any]:
        """What a trainer has beside model, optimizer, scheduler and scaler; a part of the state."""
        trainer = self._trainer
        callbacks = [
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, ExportableState)
        ]
        loss = {"_tr_loss": float(trainer._tr_loss), **{name: getattr(trainer, name) for name in _LOSS}}
        return {
            "world": self._job.world,
            "epoch": self._epoch,
            "place": self._cursor.place(self._batches_done)
            if self._cursor is not None
            else {"seen": self._batches_done},
            "state": {name: value for name, value in asdict(trainer.state).items() if name not in _OWN},
            "control": asdict(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in callbacks],
            "loss": loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; a part of it waits until the trainer is about to begin."""
        require_world(state["world"], self._job)
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        callbacks = [
            callback_
            for callback_ in trainer.callback_handler.callbacks
            if isinstance(callback_, ExportableState)
        ]
        for callback, attributes in zip(callbacks, state["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)
        self._restored = state
