"""The Llama 3 decoder: grouped-query attention, rotary embeddings, SwiGLU, RMS norms. No parallelism here.

Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.2 and table 3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 128_256
    rope_theta: float = 500_000.0


SIZES = {
    "debug": Config(dim=128, layers=6, heads=8, kv_heads=4, ffn=256, vocab=256, rope_theta=10_000.0),
    "1b": Config(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192),
    "3b": Config(dim=3072, layers=28, heads=24, kv_heads=8, ffn=8192),
    "8b": Config(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336),
    "70b": Config(dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
    "405b": Config(dim=16384, layers=126, heads=128, kv_heads=8, ffn=53248),
}


def rotations(head_dim: int, seq: int, theta: float, device: torch.device) -> Tensor:
    """Rotary position embedding as unit complex numbers, shape (seq, head_dim / 2)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(seq, device=device).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Turn neighbouring pairs of ``x`` (batch, seq, heads, head_dim) by ``freqs`` (seq, head_dim / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs[:, None, :]).flatten(-2).type_as(x)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q, k, v, each (batch, heads, seq, head_dim)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.groups = config.heads // config.kv_heads
        self.attend = attention
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        # -1 heads: with tensor parallel weights this rank has only its share of them
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs), rotate(k, freqs)
        k, v = (t.repeat_interleave(self.groups, dim=2) for t in (k, v))
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The given layers of the model, with the embedding if they are the first, the output if the last.

    Tokens (batch, seq) or hidden states (batch, seq, dim) go in; hidden states or logits (batch, seq, vocab)
    come out.
    """

    freqs: Tensor

    def __init__(
        self, config: Config, seq: int, layers: range, is_first: bool = True, is_last: bool = True
    ) -> None:
        super().__init__()
        self.config, self.seq = config, seq
        self.embedding = nn.Embedding(config.vocab, config.dim) if is_first else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
        self.norm = nn.RMSNorm(config.dim, eps=1e-5) if is_last else None
        self.output = nn.Linear(config.dim, config.vocab, bias=False) if is_last else None
        empty = torch.empty(seq, config.dim // config.heads // 2, dtype=torch.complex64)
        self.register_buffer("freqs", empty, persistent=False)

    def init_weights(self) -> None:
        """Fill the memory of a model that was built on the meta device."""
        head_dim = self.config.dim // self.config.heads
        self.freqs.copy_(rotations(head_dim, self.seq, self.config.rope_theta, self.freqs.device))
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
            elif name.endswith(("wo.weight", "w2.weight")):  # what is added to the residual stream
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.freqs)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x
