"""Lightning: `ElasticCallback`, with which ``trainer.fit()`` goes on after a failure.

    def train(job):
        trainer = lightning.Trainer(strategy="ddp", callbacks=[ElasticCallback(job)], ...)
        trainer.fit(module, loader)

After each optimizer step, with the validation that follows it, the trainer's state goes into peers' memory:
module, optimizers, schedulers, the precision's scaler, the progress of all loops, callbacks, datamodule, the
random numbers, and where the loop stands in its data. `ModelCheckpoint` stays what it is, for what is to be
kept on disk.

Lightning's own way back begins an epoch's data anew, and counts on with what it has counted (so 42 steps come
out where 40 were asked for). Here a step is saved when all that belongs to it is done, and the loops of this
one trainer are put there between their own beginnings:

1. The fit loop begins with its epochs counted as they were, as one that is in the midst of one
   (`on_advance_start`).
2. The epoch's loop counts from nothing, and is then given its counts (`reset`).
3. The loader begins the epoch as it began it and is led to where it was (`on_run_start`; it is seen first in
   `_load_combined_loader_states`, the last call before it is iterated).
4. `on_advance_end`, the last that is done for a batch, is followed by the save.

An epoch whose last step is done is gone on with at its end. What ``self.log(…, on_epoch=True)`` and metrics
of torchmetrics have gathered of an epoch comes back, too, and modules that callbacks hold (averaged weights).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.adapters.cursor import Cursor, draw_again, drawn, place_in, require_world

_OF_FIT = ("on_advance_start", "_load_combined_loader_states")
_OF_EPOCH = ("reset", "on_run_start", "on_advance_end")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
         "metric_attribute")  # fmt: skip
_NEWEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLACE = ("_first_loop_iter", "_current_fx")  # where in an epoch, and which function logged last
_COUNTS = "epoch_loop."  # names of the epoch's loop in the fit loop's state begin so


class ElasticCallback(lightning_callbacks.Callback):
    """``checkpointer``: `PeerCheckpointer(job)` where it is None. ``state``: what else must come back (a copy
    with averaged weights, a counter), as for `PeerCheckpointer.step`."""

    def __init__(
        self, job: Any, checkpointer: PeerCheckpointer | None = None, state: dict[str, Any] | None = None
    ) -> None:
        self._job, self._checkpointer = job, checkpointer or PeerCheckpointer(job)
        self._more = state or {}
        self._run: _Run | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in for the methods of the loops.

        Raises:
            UserError: the trainer takes no part in the job's process group; this version has other loops; a
                callback's state cannot be brought back.
        """
        if stage != "fit" or self._run is not None:
            return
        if (trainer.world_size, trainer.global_rank) != (self._job.world, self._job.rank):
            raise UserError(
                f"Trainer: it is rank {trainer.global_rank} of {trainer.world_size}, the job has rank "
                f'{self._job.rank} of {self._job.world}; strategy="ddp", devices=(ranks of a host) and '
                "num_nodes=(hosts) are needed"
            )
        if any(
            isinstance(callback, lightning_callbacks.StochasticWeightAveraging)
            for callback in trainer.callbacks
        ):
            raise UserError(
                "Trainer: StochasticWeightAveraging is not accepted, since it exchanges the scheduler in the "
                "midst of training; WeightAveraging and EMAWeightAveraging are"
            )
        self._run = _Run(self._job, trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All that is to come back is made: model, optimizers, schedulers."""
        run = self._run
        assert run is not None
        overrides = {
            f"callback {callback.state_key}{name}": value
            for callback in trainer.callbacks
            for name, value in vars(callback).items()
            if isinstance(value, torch.nn.Module)
        }
        state = {
            "model": trainer.strategy.model,
            **{f"optimizer{i}": optimizer for i, optimizer in enumerate(trainer.strategy.optimizers)},
            **{f"scheduler{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)},
            "precision": trainer.precision_plugin,
            "trainer": run,
            **overrides,
            **self._more,
        }
        self._checkpointer.restore(state)

        def complete(step: int) -> None:
            self._checkpointer.step(step, state)
            rate = float(trainer.strategy.optimizers[0].param_groups[0]["lr"])
            self._job.step(step, lr=rate)

        run.complete = complete


class _Run:
    """What a trainer has beside its model, optimizers and schedulers; a part of the state."""

    def __init__(self, job: Any, trainer: Trainer) -> None:
        self.complete: Callable[[int], None] = lambda step: None
        self._job, self._trainer = job, trainer
        self._cursor: Cursor | None = None
        self._restored: dict[str, Any] | None = None  # what was restored, until it is used up
        self._done = trainer.global_step
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._plain: dict[str, Callable[..., Any]] = {}
        for loop, names in ((self._fit, _OF_FIT), (self._epoch, _OF_EPOCH)):
            for name in names:
                if not hasattr(loop, name):
                    raise UserError(f"{type(loop).__name__} has no {name}; lightning 2.6 is accepted")
                mine = f"{'fit' if loop is self._fit else 'epoch'}_{name.removeprefix('_')}"
                self._plain[mine] = getattr(loop, name)
                setattr(loop, name, getattr(self, mine))

    def fit_load_combined_loader_states(self) -> None:
        """The loader is there, and about to be iterated."""
        self._plain["fit_load_combined_loader_states"]()
        loaders = self._fit._combined_loader.flattened
        if len(loaders) != 1:
            raise UserError(f"Trainer: {len(loaders)} loaders of training data; one is accepted")
        self._cursor = place_in(loaders[0])

    def fit_on_advance_start(self) -> None:
        """An epoch begins, or the one that is gone on with."""
        if self._restored is not None:
            own = {
                name: state for name, state in self._restored["loops"].items() if not name.startswith(_COUNTS)
            }
            self._fit._load_from_state_dict(own, "")
            self._fit._restart_stage = RestartStage.RESTARTED_MID_EPOCH
            self._trainer.should_stop = self._restored["should_stop"]
        self._plain["fit_on_advance_start"]()

    def epoch_reset(self) -> None:
        """The epoch's counts are put to nothing, or to what they were."""
        self._plain["epoch_reset"]()
        if self._restored is not None:
            _load(self._epoch, self._restored["loops"], _COUNTS)
            self._done = self._trainer.global_step
            _log_again(self._trainer, self._restored["logged"])

    def epoch_on_run_start(self, fetcher: Any) -> None:
        """The loader begins the epoch, or is led to where it was."""
        restored, self._restored = self._restored, None
        if restored is None:
            self._plain["epoch_on_run_start"](fetcher)
            return
        batches, cursor = self._epoch.batch_progress.current.ready, self._cursor
        if cursor is not None:
            cursor.go_to(restored["place"])
        iter(fetcher)
        if cursor is None or not cursor.skips:
            for _ in range(batches):
                next(fetcher)
        if cursor is None:
            draw_again(None, restored["drawn"])
        elif batches == self._trainer.num_training_batches:
            cursor.settle()
        fetcher.fetched = 0  # what is counted next is what was seen
        self._fit._resuming_from_checkpoint = True  # so that it is not begun once more
        self._plain["epoch_on_run_start"](fetcher)
        self._fit._resuming_from_checkpoint = False

    def epoch_on_advance_end(self, fetcher: Any) -> None:
        """A batch is done, with the validation after it."""
        self._plain["epoch_on_advance_end"](fetcher)
        if self._trainer.global_step > self._done:
            self._done = self._trainer.global_step
            self.complete(self._done - 1)

    def state_dict(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        batches = self._epoch.batch_progress.current.ready
        loops = self._fit.state_dict()
        loops["state_dict"] = {}  # of loaders that have a state: theirs are led back by the cursor, too
        extra: dict[str, Any] = {"state_dict": module.state_dict()}  # as hooks find it; not saved twice
        for hooked in _hooked(trainer):
            hooked.on_save_checkpoint(trainer, module, extra)
        module.on_save_checkpoint(extra)
        del extra["state_dict"]
        return {
            "world": self._job.world,
            "loops": loops,
            "should_stop": trainer.should_stop,
            "place": self._cursor.place(batches) if self._cursor is not None else None,
            "drawn": drawn(None) if self._cursor is None else None,
            "logged": _logged(trainer),
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "extra": extra,
            "metrics": {
                name: [hooked.update_count, hooked.metric_state] for name, hooked in _metrics(module)
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_world(state["world"], self._job)
        trainer, module = self._trainer, self._trainer.lightning_module
        for callback in trainer.callbacks:
            if saved := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(saved)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if extra := state["extra"]:
            extra["state_dict"] = module.state_dict()
            for hooked in _hooked(trainer):
                hooked.on_load_checkpoint(trainer, module, extra)
            module.on_load_checkpoint(extra)
        for name, metric in _metrics(module):
            metric._update_count, values = state["metrics"][name]
            vars(metric).update(move_data_to_device(values, metric.device))
        self._restored = state


def _hooked(trainer: Any) -> list[Any]:
    """The callbacks that write into a checkpoint by themselves. Not those with a model beside the one that is
    trained, which is in the state."""
    plain = lightning_callbacks.Callback.on_save_checkpoint
    own = (lightning_callbacks.WeightAveraging, lightning_callbacks.ModelPruning)
    return [
        callback
        for callback in trainer.callbacks
        if type(callback).on_save_checkpoint is not plain and not isinstance(callback, own)
    ]


def _metrics(module: torch.nn.Module) -> list[tuple[str, Metric]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _load(loop: Any, state: dict[str, Any], prefix: str) -> None:
    """As ``loop.load_state_dict``, without its word that the loop is restarting."""
    loop._load_from_state_dict(state, prefix)
    for name, inner in vars(loop).items():
        if hasattr(inner, "_load_from_state_dict"):
            _load(inner, state, f"{prefix}{name}.")


def _logged(trainer: Any) -> dict[str, Any]:
    """What ``self.log`` has gathered in this epoch, and the newest values that callbacks may monitor."""
    connector, gathered = trainer._logger_connector, []
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        if not result.has_reset and (result.is_tensor or result.meta.metric_attribute):
            sync = result.meta.sync
            gathered.append(
                {
                    "key": key,
                    "meta": {name: getattr(result.meta, name) for name in _META}
                    | {"reduce_fx": result.meta.reduce_fx.__name__},
                    "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
                    "is_tensor": result.is_tensor,
                    "values": _numbers(result.metric_state | {"_forward_cache": result._forward_cache}),
                }
            )
    newest = {name: _numbers(getattr(connector, name)) for name in _NEWEST}
    return {
        "gathered": gathered,
        "newest": newest,
        "place": {field: getattr(connector, field) for field in _PLACE},
    }


def _log_again(trainer: Any, logged: dict[str, Any]) -> None:
    """The inverse of `_logged`."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    device = trainer.strategy.root_device
    for gathered in logged["gathered"]:
        meta = _Metadata(**gathered["meta"])
        # the program's own call is held to it
        meta.sync = _Sync(fn=trainer.strategy.reduce, **gathered["sync"])
        result_metric = results[gathered["key"]] = _ResultMetric(meta, gathered["is_tensor"])
        vars(result_metric).update(_tensors(gathered["values"], device))
        if not result_metric.is_tensor:
            result_metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        result_metric._update_count = 1  # else it warns that nothing was logged
    for name in _NEWEST:
        getattr(connector, name).update(_tensors(logged["newest"][name], device))
    # Without these the next batch counts as the first of an epoch, whose first `self.log` drops it all.
    vars(connector).update(logged["place"])


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """With numbers in the place of tensors: the state keeps its tensors from step to step."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return values | {
        name: (tensor.item(), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
    }


def _tensors(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The inverse of `_numbers`."""
    numbers = {name: number for name, number in values.items() if isinstance(number, tuple)}
    return values | {
        name: torch.tensor(number, dtype=getattr(torch, dtype), device=device)
        for name, (number, dtype) in numbers.items()
    }
