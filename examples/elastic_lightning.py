"""Lightning's Trainer, and what it takes to survive: the lines with a mark.

windtunnel train --hosts 2 --inject kill:host=1,step=7 examples/elastic_lightning.py
"""

import hashlib

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from windtunnel.training.checkpoint.adapters.lightning import ElasticCallback  # elastic
from windtunnel.training.elastic import Job, run  # elastic

CONTEXT = 12


class Bytes(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Embedding(64, 16),
            nn.Flatten(1),
            nn.Linear(16 * CONTEXT, 32),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(32, 64),
        )

    def training_step(self, batch: tuple, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.network(tokens), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple, batch_idx: int) -> None:
        tokens, targets = batch
        self.log("val_loss", F.cross_entropy(self.network(tokens), targets), sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(count: int, seed: int, shuffle: bool) -> DataLoader:
    text = torch.randint(64, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(text[:, :-1], text[:, -1]), batch_size=2, shuffle=shuffle)


def train(job: Job) -> dict:  # elastic: it was main()
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=1,
        num_nodes=job.world,
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=4,
        callbacks=[ElasticCallback(job)],  # elastic
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Bytes()
    trainer.fit(module, loader(44, 1, shuffle=True), loader(8, 2, shuffle=False))
    weights = torch.cat([one.detach().flatten() for one in module.parameters()])
    digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch, **logged, "weights": digest}


if __name__ == "__main__":
    run(train)  # elastic: main()
