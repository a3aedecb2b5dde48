"""FullyShardedDataParallel, the first: wrapped by a policy, mixed precision, a full state dict."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, vocabulary, layers, width, heads):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask.to(x.dtype), is_causal=True)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    half = torch.bfloat16
    model = FullyShardedDataParallel(
        Model(4096, 2, 512, 8),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=True,
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        total = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{total:,} parameters")
    for step in range(args.steps):
        tokens = torch.randint(4096, (args.batch, args.sequence + 1), device="cuda")
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == args.steps - 1:
            full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
                state = model.state_dict()
            if dist.get_rank() == 0:
                torch.save(state, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
