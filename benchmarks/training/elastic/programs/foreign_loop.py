"""One small model in four loops: one of plain PyTorch, three that frameworks run, each made elastic by the
lines that its page says. Everything that a continuation can get wrong is in them: shuffled data, dropout,
accumulated gradients, a schedule, an end in the middle of an epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run

SAMPLES, BATCH, ACCUMULATED, CONTEXT = 92, 2, 2, 12  # 12 steps an epoch on two ranks, the last of one batch


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.rows = torch.randint(64, (SAMPLES, CONTEXT + 1), generator=made)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.rows[index, :-1], "labels": self.rows[index, -1]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(1), nn.Linear(32 * CONTEXT, 256))
        self.head = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.hidden(tokens)), labels)}


def tools(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def plain(job: Job, model: Model, steps: int) -> None:
    """DDP and a loop of one's own, with torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    wrapped = DistributedDataParallel(model)
    optimizer, scheduler = tools(wrapped, steps)
    loader = StatefulDataLoader(Rows(), BATCH, sampler=DistributedSampler(Rows(), job.world, job.rank))
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"loader": loader, "epoch": 0}
    checkpointer = PeerCheckpointer(job)
    step = checkpointer.restore(state)
    while step < steps:
        loader.sampler.set_epoch(state["epoch"])
        for batch in loader:
            if step == steps:
                break
            optimizer.zero_grad()
            wrapped(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step(step, state)
            job.step(step, lr=scheduler.get_last_lr()[0])
            step += 1
        state["epoch"] += 1


def hf(job: Job, model: Model, steps: int) -> None:
    """transformers.Trainer."""
    from transformers import Trainer, TrainingArguments

    from windtunnel.training.checkpoint.adapters.huggingface import ElasticCallback

    args = TrainingArguments(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED, max_steps=steps, learning_rate=1e-2, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Rows())
    ElasticCallback(job).attach(trainer)
    trainer.train()


def lightning(job: Job, model: Model, steps: int) -> None:
    """lightning.Trainer."""
    import lightning as framework

    from windtunnel.training.checkpoint.adapters.lightning import ElasticCallback

    class Module(framework.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = tools(self, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = framework.Trainer(
        accelerator="cpu", strategy="ddp", devices=1, num_nodes=job.world, max_steps=steps,
        accumulate_grad_batches=ACCUMULATED, callbacks=[ElasticCallback(job)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Rows(), BATCH, shuffle=True))


def accelerate(job: Job, model: Model, steps: int) -> None:
    """A loop of one's own with Accelerate."""
    from windtunnel.training.checkpoint.adapters.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(job, cpu=True, gradient_accumulation_steps=ACCUMULATED)
    loader = DataLoader(Rows(), BATCH, shuffle=True)
    # Accelerate steps the schedule once for each rank.
    made = tools(model, job.world * steps)
    wrapped, optimizer, scheduler, loader = accelerator.prepare(model, *made, loader)
    for _epoch in accelerator.epochs(-(-steps // 12)):
        for batch in accelerator.batches(loader):
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


LOOPS = {"ddp": plain, "hf": hf, "lightning": lightning, "accelerate": accelerate}


def train(job: Job, loop: str, steps: int) -> str:
    torch.manual_seed(3)
    model = Model()
    torch.manual_seed(100 + job.rank if loop == "ddp" else 3)
    LOOPS[loop](job, model, steps)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    run(lambda job: train(job, options.loop, options.steps))
