"""A plain loop as people have it: DDP without a flag, a data loader that shuffles, with a worker, dropout,
epochs. Prints what the parameters are in the end."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run

EPOCHS, SAMPLES, BATCH = 2, 24, 4


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image, index % 5


def build() -> nn.Module:
    convolution = nn.Conv2d(3, 16, 3, padding=1)
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16 * 64, 64), nn.ReLU(), nn.Linear(64, 5))
    return nn.Sequential(convolution, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), head)


def train(job: Job) -> str:
    torch.manual_seed(1 + job.rank)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(Images(), BATCH, shuffle=True, num_workers=1)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    checkpointer = PeerCheckpointer(job)
    step = checkpointer.restore(state)
    for epoch in range(state["epoch"], EPOCHS):
        state["epoch"] = epoch
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            checkpointer.step(step, state)
            job.step(step, loss=loss.item())
            step += 1
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in [*model.parameters(), *model.buffers(), torch.get_rng_state()]:
        hasher.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(f"rank {job.rank} ends with {hasher.hexdigest()} after {step} steps", flush=True)
    return hasher.hexdigest()


if __name__ == "__main__":
    run(train)
