"""A mixture of experts over all ranks: counts are read by the host, tokens are sent where they are routed."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """Those of this rank, as one grouped product."""

    def __init__(self, count, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x, counts):
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        hidden = F.silu(torch._grouped_mm(x.bfloat16(), self.up.bfloat16(), offs=ends))
        return torch._grouped_mm(hidden, self.down.bfloat16(), offs=ends).type_as(x)


class MoE(nn.Module):
    def __init__(self, width, hidden, experts, top_k, group):
        super().__init__()
        self.group, self.experts, self.top_k = group, experts, top_k
        self.local = experts // group.size()
        self.router = nn.Linear(width, experts, bias=False)
        self.mine = Experts(self.local, width, hidden)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = torch.topk(self.router(x).softmax(-1), self.top_k, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        order = torch.argsort(chosen.flatten(), stable=True)

        # How many tokens go to whom, and how many come: the host has to know before it can send them.
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        send = counts.view(self.group.size(), -1).sum(1).tolist()
        receive = coming.view(self.group.size(), -1).sum(1).tolist()
        routed = x.index_select(0, order // self.top_k)
        out = x.new_empty(sum(receive), x.shape[1])
        arrived = all_to_all_single(out, routed, receive, send, group=self.group)

        # They come by rank and are wanted by expert.
        pieces = [torch.full((n,), i % self.local, device=x.device) for i, n in enumerate(coming.tolist())]
        by_expert = torch.argsort(torch.cat(pieces), stable=True)
        done = self.mine(arrived[by_expert], coming.view(-1, self.local).sum(0))
        arrived = torch.empty_like(done).index_copy(0, by_expert, done)

        back = all_to_all_single(torch.empty_like(routed), arrived, send, receive, group=self.group)
        back = torch.empty_like(back).index_copy(0, order, back).view(-1, self.top_k, x.shape[1])
        return (back * weights.unsqueeze(-1)).sum(1).view(shape)


class Block(nn.Module):
    def __init__(self, width, heads, hidden, experts, top_k, group):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = MoE(width, hidden, experts, top_k, group)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.moe(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, vocabulary, layers, width, heads, hidden, experts, top_k, group):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden, experts, top_k, group) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=500)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = Model(2048, 2, 256, 4, 512, args.experts, args.top_k, dist.group.WORLD).cuda()
    experts = [name for name, _ in model.named_parameters() if ".mine." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        tokens = torch.randint(2048, (args.batch, args.sequence + 1), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
