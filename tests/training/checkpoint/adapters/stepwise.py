"""Loops of frameworks, each once as a whole and once more from every step of it: `main` prints what came.

All in one process, which is the only rank; `Kept` is in the place of `PeerCheckpointer`.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from windtunnel.training.checkpoint.live import objects
from windtunnel.training.checkpoint.live.layout import Entry
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
        self.saved[step] = entries, values, objects.pack(others)

    def restore(self, state: dict[str, Any]) -> int:
        if self._given is None:
            return 0
        entries: dict[str, Entry]
        entries, values, packed = self._given
        others = objects.unpack(packed)
        wants(state, entries, set(others))
        put(state, values.__getitem__, lambda name: entries[name].whole, others)
        return 1


def digest(module: nn.Module) -> str:
    return torch.cat([one.detach().flatten().double() for one in module.parameters()]).sum().item().hex()


def rows(count: int, seed: int) -> TensorDataset:
    values = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(values, values.sum(1, keepdim=True).tanh())


def lightning(kept: Kept) -> list[Any]:
    """What a callback can monitor after every batch, validation and epoch. Logged are values of a step, of an
    epoch, of both; means, sums and extremes; some in every third batch only."""
    import lightning

    from windtunnel.training.checkpoint.adapters.lightning import ElasticCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            values, targets = batch
            loss = nn.functional.mse_loss(self.network(values), targets)
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
            self.log("val_loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Watch(lightning.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def note(self, trainer: Any, what: str) -> None:
            found = {name: float(one) for name, one in sorted(trainer.callback_metrics.items())}
            self.seen.append([trainer.current_epoch, trainer.global_step, what, found])

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.note(trainer, "batch")

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.note(trainer, "validation")

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            self.note(trainer, "epoch")

    lightning.seed_everything(3, verbose=False)
    watch = Watch()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=4,
        callbacks=[watch, ElasticCallback(JOB, kept)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(rows(22, 1), 2, shuffle=True), DataLoader(rows(8, 2), 2))
    watch.note(trainer, "end")
    return [*watch.seen, digest(module)]


LOOPS = {one.__name__: one for one in (lightning,)}


def main(name: str) -> None:
    whole = Kept()
    given = [LOOPS[name](whole)]
    given += [LOOPS[name](Kept(state)) for state in whole.saved.values()]
    print(json.dumps(given))


if __name__ == "__main__":
    main(sys.argv[1])
