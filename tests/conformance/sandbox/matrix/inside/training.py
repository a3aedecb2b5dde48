"""A small network trained twice from one seed: at once, and with time between the steps."""

import os
import time

import torch

STEPS = 30
torch.set_num_threads(2)


def losses(between: bool) -> list[float]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(256, 256)), torch.randint(0, 10, (256,)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
        if between:
            print(f"step {step} {loss.item():.6f}", flush=True)
            while step > 5 and not os.path.exists("/row/go"):
                time.sleep(0.05)
            time.sleep(0.05)
    return values


expected, actual = losses(False), losses(True)
print("ended well" if expected == actual else f"ended: {actual} are not {expected}", flush=True)
