"""What jobs call a step, one way a case: ``python steps.py case_gan`` trains small layers for six of them."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 6


def layer():
    return nn.Linear(8, 8, device="cuda")


def loss_of(model):
    return model(torch.randn(4, 8, device="cuda")).square().mean()


def case_plain():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        schedule.step()


def case_gan():
    first, second = layer(), layer()
    one, other = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters())
    for _ in range(STEPS):
        for model, optimizer in ((first, one), (second, other)):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()


def case_while_backward_runs():
    model = nn.Sequential(layer(), layer(), layer())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        loss_of(model).backward()


def case_group_by_group():
    model = nn.Sequential(layer(), layer())
    optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in model])
    for _ in range(STEPS):
        loss_of(model).backward()
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        optimizer.zero_grad()


def case_closure():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(STEPS):
        loss_of(model).backward()  # a micro-batch outside, the last one inside
        optimizer.step(closure)


def case_lbfgs():
    model = layer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, max_eval=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure=closure)


def case_without_modules():
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    bias = torch.zeros(8, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    for _ in range(STEPS):
        F.linear(torch.randn(4, 8, device="cuda"), weight, bias).mean().backward()
        optimizer.step()


class Buckets(nn.Module):
    """With attributes of the names that a module's methods have, as Megatron's DDP."""

    def __init__(self):
        super().__init__()
        self.layer = layer()
        self.buffers = [torch.zeros(3, device="cuda")]

    def forward(self, x):
        return self.layer(x)


def case_buckets():
    model = Buckets()
    optimizer = torch.optim.SGD(nn.Module.parameters(model), lr=0.1)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def case_once():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()


def case_by_hand():
    model = layer()
    for _ in range(STEPS):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


if __name__ == "__main__":
    globals()[sys.argv[1]]()
