"""Jobs of small layers, one a case: what they call a step, and which of their steps are alike.

python periods.py case_gan
python periods.py case_diloco 4
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.nn import functional as F

import windtunnel as wt

STEPS, FEW = 60, 6


def layer():
    return nn.Linear(64, 64, device="cuda")


def loss_of(model):
    return model(torch.randn(4, 64, device="cuda")).square().mean()


def plain():
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())

    def update():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss

    return model, update


def case_diloco(every):
    dist.init_process_group("nccl")
    model, update = plain()
    common = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, STEPS + 1):
        update()
        if step % every == 0:
            for weight, p in zip(common, model.parameters(), strict=True):
                weight.grad = weight - p.detach()
                dist.all_reduce(weight.grad)
            outer.step()


def case_streams(_):
    """A stream of its own for each step, as DDP's communication hooks take one for what follows a message."""
    _, update = plain()
    for _ in range(STEPS):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.zeros(64, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        update()


def case_wgan(critics):
    critic, generator = layer(), layer()
    of_critic = torch.optim.RMSprop(critic.parameters())
    of_generator = torch.optim.RMSprop(generator.parameters())
    for _ in range(STEPS):
        for _ in range(critics):
            of_critic.zero_grad()
            real = torch.randn(4, 64, device="cuda", requires_grad=True)
            score = critic(real).mean() - critic(generator(torch.randn(4, 64, device="cuda")).detach()).mean()
            (slope,) = torch.autograd.grad(score, real, create_graph=True)
            (score + slope.norm()).backward()
            of_critic.step()
        of_generator.zero_grad()
        loss_of(nn.Sequential(generator, critic)).backward()
        of_generator.step()


def case_grpo(updates):
    model, update = plain()
    for _ in range(STEPS):
        with torch.no_grad():
            tokens = torch.randn(4, 64, device="cuda")
            for _ in range(16):
                tokens = model(tokens)
        for _ in range(updates):
            update()


def case_epochs(steps):
    """The last batch of nine is smaller, and the second such epoch ends the script."""
    dist.init_process_group()
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(int(steps)):
        optimizer.zero_grad()
        model(torch.ones(3 if step % 9 == 8 else 8, 64, device="cuda")).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def case_saves(every):
    model, update = plain()
    for step in range(1, STEPS + 1):
        update()
        if step % every == 0:
            checkpoint.save({"model": model.state_dict()}, checkpoint_id="nowhere")


def case_graph(warm_up):
    _, update = plain()
    for _ in range(warm_up):
        update()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    for _ in range(STEPS):
        graph.replay()


def case_warms_up(steps):
    _, update = plain()
    for step in range(STEPS):
        update()
        if step >= steps:
            torch.zeros(3, device="cuda")


def case_reads(every):
    _, update = plain()
    for step in range(STEPS):
        loss = update()
        if step % every == 0:
            print(loss.item())


def case_marks(updates):
    _, update = plain()
    for _ in range(STEPS):
        for _ in range(updates):
            update()
        wt.step()


def case_marks_without_optimizer(calls):
    model = layer()
    for _ in range(STEPS):
        for _ in range(calls):
            loss_of(model)
        wt.step()


def case_grows(_):
    model = layer()
    for step in range(STEPS):
        model(torch.randn(4 + step, 64, device="cuda")).mean().backward()
        if not step:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = layer(), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def case_counts_calls(_):
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        assert model.calls == step + 1


def case_plain(_):
    _, update = plain()
    for _ in range(STEPS):
        update()


def case_scheduled():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(FEW):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        schedule.step()


def case_gan():
    first, second = layer(), layer()
    sgd, adam = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters())
    for _ in range(FEW):
        for model, optimizer in ((first, sgd), (second, adam)):
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
    for _ in range(FEW):
        loss_of(model).backward()


def case_group_by_group():
    model = nn.Sequential(layer(), layer())
    optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in model])
    for _ in range(FEW):
        loss_of(model).backward()
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        optimizer.zero_grad()


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


def case_closure():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(FEW):
        loss_of(model).backward()  # a micro-batch outside, the last one inside
        optimizer.step(closure_of(model, optimizer))


def case_lbfgs():
    model = layer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, max_eval=3)
    for _ in range(FEW):
        optimizer.step(closure=closure_of(model, optimizer))


def case_without_modules():
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    bias = torch.zeros(8, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    for _ in range(FEW):
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
    for _ in range(FEW):
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
    for _ in range(FEW):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(int, sys.argv[2:]))
