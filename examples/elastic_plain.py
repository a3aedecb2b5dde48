"""A plain PyTorch loop, and what it takes to survive: the nine lines with a mark. The rest is as it was.

torchrun --nproc-per-node 2 examples/elastic_plain.py
windtunnel train --hosts 4 --inject kill:host=2,step=7 examples/elastic_plain.py
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader  # elastic: it was DataLoader

from text_data import TEXT, Bytes
from windtunnel.training.checkpoint import PeerCheckpointer  # elastic
from windtunnel.training.elastic import Job, run  # elastic

STEPS, BATCH, CONTEXT = 30, 32, 16


def train(job: Job) -> dict:  # elastic: it was main(), and made its process group itself
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(1), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    dataset = Bytes(TEXT, CONTEXT, STEPS * BATCH)

    mine = [list(range(s * BATCH + job.rank, (s + 1) * BATCH, job.world)) for s in range(STEPS)]
    loader = StatefulDataLoader(dataset, batch_sampler=mine)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}  # elastic
    checkpointer = PeerCheckpointer(job)  # elastic
    first = checkpointer.restore(state)  # elastic: called again after a failure, it finds the newest step

    for step, (tokens, targets) in enumerate(loader, first):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), targets[:, -1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        if job.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
        checkpointer.step(step, state)  # elastic: saved here and on a peer before the next one is
        job.step(step, loss=loss.item())  # elastic: "this step is done"

    weights = torch.cat([one.detach().flatten() for one in network.parameters()])
    return {"weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()}


if __name__ == "__main__":
    run(train)
