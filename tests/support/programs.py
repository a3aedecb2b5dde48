"""Programs of users, to be emulated as functions."""

from __future__ import annotations


def train(width: int, steps: int = 3) -> None:
    """What a user would write in a notebook."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = DistributedDataParallel(torch.nn.Linear(width, width, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
