"""One rank: gradients by the hook are those of DDP's own way."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from windtunnel.network import aggregation

dist.init_process_group("gloo")
torch.manual_seed(0)
plain, hooked = (
    DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(*size) for size in ((300, 200), (200, 10))))
    )
    for _ in range(2)
)
hooked.load_state_dict(plain.state_dict())
with aggregation.connect(sys.argv[1]) as group:
    hooked.register_comm_hook(group, aggregation.hook)
    data = torch.randn(8, 300, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        for model in (plain, hooked):
            model.zero_grad()
            model(data).square().sum().backward()
    for parameter, other in zip(plain.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-5, atol=1e-4)
    dist.barrier()
print("equal")
dist.destroy_process_group()
