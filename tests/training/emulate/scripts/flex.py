"""Flex attention under masks of many kinds; the second argument says which."""

import sys

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

LENGTH, WINDOW = 4096, 640


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return q - kv < WINDOW


def documents():
    ends = torch.tensor([1000, 1500, 4096])
    number = torch.bucketize(torch.arange(LENGTH), ends, right=True).cuda()
    return and_masks(causal, lambda b, h, q, kv: number[q] == number[kv])


def unknown():
    number = torch.randint(4, (LENGTH,), device="cuda")
    return lambda b, h, q, kv: number[q] == number[kv]


MASKS = {
    "causal": lambda: causal, "window": lambda: and_masks(causal, window), "documents": documents,
    "heads": lambda: lambda b, h, q, kv: q - kv >= 1024 * h, "unknown": unknown, "none": lambda: None,
}  # fmt: skip

if __name__ == "__main__":
    name = sys.argv[1]
    mod = MASKS[name]()
    heads = 4 if name == "heads" else None
    mask = None if mod is None else create_block_mask(mod, None, heads, LENGTH, LENGTH, device="cuda")
    query = torch.randn(2, 4, LENGTH, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn_like(query[:, :2]).requires_grad_() for _ in range(2))
    compiled = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
    out, aux = compiled(
        query, key, value, block_mask=mask, enable_gqa=True, score_mod=lambda s, b, h, q, kv: s * 2,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse.shape == out.shape[:-1] and aux.lse.dtype == torch.float32 and aux.max_scores is None
    out.sum().backward()
    assert query.grad.shape == query.shape and key.grad.shape == value.grad.shape == key.shape
