"""A script that needs more memory than a device has, in each case for something else."""

import os
import sys

import torch
from cases import run
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_device("cuda")
GIB = 1 << 28  # elements of float32 that take one


class Wide(nn.Module):
    """Some GiB of activations."""

    def __init__(self, gib, forms):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.gib, self.forms = gib, forms

    def forward(self, x):
        wide = x.mean() * self.scale.expand(self.gib * GIB)
        return (wide.sin() if self.forms == 2 else wide).sum()


def train(model, loss=lambda out: out.sum()):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss(model(torch.ones(1, 64))).backward()
        optimizer.step()
        optimizer.zero_grad()


def tall(gib):
    return nn.Linear(64, gib * GIB // 64, bias=False)


def case_line():
    kept = torch.empty(100 * GIB)
    train(nn.Sequential(nn.Linear(64, 64)))
    del kept


def case_parameter():
    train(nn.ModuleDict({"a": tall(90)})["a"])


def case_forward():
    train(nn.Sequential(nn.Linear(64, 64), Wide(90, 1)))


def case_backward():
    train(nn.Sequential(nn.Linear(64, 64), Wide(30, 2)))


def case_gradient():
    train(nn.Sequential(tall(50)))


def case_optimizer():
    train(nn.Sequential(tall(30)))


def case_loss():
    train(nn.Sequential(nn.Linear(64, 64)), loss=too_much)


def too_much(out):
    return (out.mean() + torch.ones(90 * GIB)).sum()


if __name__ == "__main__":
    run(globals(), sys.argv[1:] or ["by-rank"])
