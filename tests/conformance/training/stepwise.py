"""Loops of frameworks, each once as a whole and once more from every step of it: `main` prints what came.

All in one process, which is the only rank; `Kept` is in the place of `PeerCheckpointer`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from windtunnel.training.checkpoint.live import objects
from windtunnel.training.checkpoint.live.layout import TensorEntry
from windtunnel.training.checkpoint.live.state import entry, put, walk, wants

JOB = SimpleNamespace(world=1, rank=0, step=lambda *_, **__: None)


class Kept:
    """Keeps the state of every step as `PeerCheckpointer` does: tensors by name, and everything else as
    bytes."""

    def __init__(self, given: Any = None) -> None:
        self.saved: dict[int, Any] = {}
        self._given = given

    def step(self, step: int, state: dict[str, Any]) -> None:
        tensors, others = walk(state)
        entries = {name: entry(name, tensor, 0) for name, tensor in tensors}
        values = {name: tensor.detach().clone() for name, tensor in tensors}
        self.saved[step] = step, entries, values, objects.pack(others)

    def restore(self, state: dict[str, Any]) -> int:
        if self._given is None:
            return 0
        entries: dict[str, TensorEntry]
        step, entries, values, packed = self._given
        others = objects.unpack(packed)
        wants(state, entries, set(others))
        put(state, values.__getitem__, lambda name: entries[name].whole, others)
        return int(step) + 1


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def loss_of(model: nn.Module, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 8 * nn.functional.mse_loss(model(values), targets)


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def scaler(largest: int) -> torch.amp.GradScaler:
    """It grows every other step, soon so far that a step is left out. ``largest``: exponent of the type."""
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** (largest - 1), growth_interval=2)


def digest(module: nn.Module) -> str:
    values = [tensor.detach().flatten() for tensor in module.state_dict().values()]
    return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()


def rows(count: int, seed: int) -> TensorDataset:
    values = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(values, values.sum(1, keepdim=True).tanh())


class Patience(dict):
    """Early stopping as a loop of one's own has it: a plain value of the state."""

    def lost(self, loss: float) -> bool:
        better = loss < self["best"] - 0.05
        self.update(best=loss if better else self["best"], waited=0 if better else self["waited"] + 1)
        return self["waited"] > 4


def accelerate(kept: Kept) -> list[Any]:
    from windtunnel.training.checkpoint.adapters.accelerate import ElasticAccelerator

    torch.manual_seed(3)
    model = Network()
    ema, patience = averaged(model), Patience(best=9.0, waited=0)
    more = {"ema": ema, "patience": patience}
    accelerator = ElasticAccelerator(JOB, kept, more, cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = scaler(127)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
    loader = DataLoader(rows(22, 1), 2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    log: list[Any] = []
    for epoch in accelerator.epochs(3):
        for values, targets in accelerator.batches(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model, values, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.update_parameters(model)
                patience.lost(float(loss))
            log.append([epoch, float(loss), accelerator.scaler.get_scale(), dict(patience)])
        log.append([epoch, scheduler.get_last_lr(), float(torch.rand(()))])
    return [*log, digest(model), digest(ema)]


def hf(kept: Kept) -> list[Any]:
    """It stops early, in the midst of its last epoch."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from windtunnel.training.checkpoint.adapters.huggingface import ElasticTrainerCallback

    class Model(Network):
        def forward(self, values: torch.Tensor, labels: torch.Tensor) -> Any:
            outputs = super().forward(values)
            return {"loss": nn.functional.mse_loss(outputs, labels), "found": outputs}

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.notes: list[Any] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ema.update_parameters(model)
            self.notes.append([state.global_step, trainer.accelerator.scaler.get_scale()])

    def collate(given: Any) -> Any:
        return dict(zip(("values", "labels"), map(torch.stack, zip(*given, strict=True)), strict=True))

    args = TrainingArguments(
        output_dir=".",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        seed=3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        metric_for_best_model="loss",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(3)
    model, watch = Model(), Watch()
    ema = averaged(model)
    early = EarlyStoppingCallback(4, 0.5)
    data = {"train_dataset": rows(44, 1), "eval_dataset": rows(8, 2), "data_collator": collate}
    trainer = Trainer(model, args, callbacks=[watch, early], **data)
    trainer.accelerator.scaler = scaler(63)  # the norm, of squares, overflows first
    ElasticTrainerCallback(JOB, kept, {"ema": ema}).attach(trainer)
    trainer.train()
    logged = [
        {k: v for k, v in entry.items() if "run" not in k and "per" not in k}
        for entry in trainer.state.log_history
    ]
    return [*watch.notes, logged, digest(model), digest(ema)]


def lightning(kept: Kept) -> list[Any]:
    """What a callback can monitor after every batch, validation and epoch. Logged are values of a step, of an
    epoch, of both; means, sums and extremes; some in every third batch only."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
    from lightning.pytorch.plugins import MixedPrecision
    from torchmetrics import MeanMetric

    from windtunnel.training.checkpoint.adapters.lightning import ElasticCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            self.metric = MeanMetric()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            values, targets = batch
            loss = loss_of(self.network, values, targets)
            self.metric(loss, number + 1)
            self.log("metric", self.metric, on_step=True, on_epoch=True)
            self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("step", loss, on_step=True, on_epoch=False)
            self.log("mean", loss, on_step=False, on_epoch=True, batch_size=number + 1)
            if number % 3 == 1:
                for name in ("max", "min", "sum"):
                    self.log(name, loss, on_step=True, on_epoch=True, reduce_fx=name)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("rate", self.optimizers().param_groups[0]["lr"])

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", loss_of(self.network, *batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Watch(lightning.Callback):
        def __init__(self) -> None:
            self.notes: list[Any] = []

        def note(self, trainer: Any, what: str) -> None:
            metrics = {name: float(metric) for name, metric in sorted(trainer.callback_metrics.items())}
            metrics["scale"] = trainer.precision_plugin.scaler.get_scale()
            self.notes.append([trainer.current_epoch, trainer.global_step, what, metrics])

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.note(trainer, "batch")

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.note(trainer, "validation")

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            self.note(trainer, "epoch")

    lightning.seed_everything(3, verbose=False)
    watch, ema = Watch(), EMAWeightAveraging(decay=0.8)
    early = EarlyStopping("val_loss", min_delta=5.0, patience=5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=4,
        callbacks=[watch, ema, early, ElasticCallback(JOB, kept)],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler(16))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(rows(22, 1), 2, shuffle=True), DataLoader(rows(8, 2), 2))
    watch.note(trainer, "end")
    return [*watch.notes, early.wait_count, digest(module)]  # on_train_end has put the average into it


LOOPS = {loop.__name__: loop for loop in (accelerate, hf, lightning)}


def main(name: str) -> None:
    whole = Kept()
    given = [LOOPS[name](whole)]
    given += [LOOPS[name](Kept(state)) for state in whole.saved.values()]
    print(json.dumps(given))


if __name__ == "__main__":
    main(sys.argv[1])
