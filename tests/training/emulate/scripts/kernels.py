"""Attention in many forms, copies of many kinds, and work on two streams, each known by its size."""

import torch
import torch.nn.functional as F

HALF = torch.bfloat16


def attend(queries, keys, heads, kv_heads, dtype, **options):
    q = torch.empty(2, heads, queries, 64, device="cuda", dtype=dtype)
    k = torch.empty(2, kv_heads, keys, 64, device="cuda", dtype=dtype)
    F.scaled_dot_product_attention(q, k, k, **options)


attend(128, 128, 8, 8, HALF, is_causal=True)
attend(128, 128, 8, 2, HALF, is_causal=True, enable_gqa=True)
attend(128, 128, 8, 8, torch.float32, is_causal=True)
attend(128, 128, 8, 8, HALF, attn_mask=torch.empty(128, 128, device="cuda", dtype=torch.bool))
attend(64, 128, 8, 8, HALF, is_causal=True)
attend(128, 128, 8, 8, HALF, dropout_p=0.1)
attend(128, 128, 8, 2, torch.float32, enable_gqa=True)

KIB = 1 << 10
pageable = {n: torch.empty(n * KIB, dtype=torch.uint8) for n in (1, 100, 101)}
pinned = {n: torch.empty(n * KIB, dtype=torch.uint8).pin_memory() for n in (200, 201)}
for n, host in {**pageable, **pinned}.items():
    host.to("cuda", non_blocking=n not in (101, 201))
back = torch.empty(300 * KIB, dtype=torch.uint8, device="cuda")
torch.empty(300 * KIB, dtype=torch.uint8, pin_memory=True).copy_(back, non_blocking=True)
back.cpu()

side = torch.cuda.Stream()
x = torch.ones(7, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    y = x * 2
x.record_stream(side)
torch.cuda.current_stream().wait_stream(side)
y + x


@torch.library.custom_op("mine::scale", mutates_args=(), device_types="cuda")
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    raise RuntimeError("a kernel of a device that is not there")


@scale.register_fake
def _(x, by):
    return torch.empty_like(x)


scale.register_autograd(lambda context, grad: (grad * 2, None))
z = torch.ones(5, 5, device="cuda", requires_grad=True)
scale(z, 2.0).sum().backward()
assert z.grad.shape == z.shape
