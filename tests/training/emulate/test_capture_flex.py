"""Flex attention is one kernel of the work that its mask leaves."""

from __future__ import annotations

import sys

import pytest
from capturing import SCRIPTS, capture

from windtunnel.training.emulate.graph import Operator, Slice
from windtunnel.training.emulate.twin.costs.work import counted_flops, kind_of

sys.path.insert(0, str(SCRIPTS))
LENGTH = 4096
ALL = 2 * 2.0 * 2 * 4 * LENGTH * LENGTH * 64  # two products of every score, batch 2, 4 heads of 64


def attention(slice_: Slice) -> list[Operator]:
    kernels = [slice_.operators[e["ref"]] for e in slice_.events if e["kind"] == 0]
    return [op for op in kernels if op.name.startswith("flex.")]


def blocks_of_torch(name: str) -> float:
    """The share of blocks that PyTorch's own function finds to be not empty, on the CPU."""
    import flex as script
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    masks = {
        "causal": script.causal,
        "window": script.and_masks(script.causal, script.window),
        "heads": script.MASKS["heads"](),
    }
    number = torch.bucketize(torch.arange(LENGTH), torch.tensor([1000, 1500, 4096]), right=True)
    masks["documents"] = script.and_masks(script.causal, lambda b, h, q, kv: number[q] == number[kv])
    heads = 4 if name == "heads" else None
    mask = create_block_mask(masks[name], None, heads, LENGTH, LENGTH, device="cpu")
    return 1 - mask.sparsity() / 100


@pytest.mark.parametrize("name", ["causal", "window", "documents", "heads"])
def test_its_work_is_what_its_mask_leaves(name: str) -> None:
    slice_ = capture("flex.py", name)[0]
    forward, backward = attention(slice_)
    assert kind_of(forward) == kind_of(backward) == "attention"
    assert counted_flops(forward) == pytest.approx(ALL * blocks_of_torch(name), rel=0.02)
    assert counted_flops(backward) == pytest.approx(2.5 * counted_flops(forward))
    said = [note.text for note in slice_.notes if "flex attention" in note.text]
    assert len(said) == 1 and "of 128 × 128 that its mask leaves" in said[0]


@pytest.mark.parametrize(("name", "share", "words"), [
    ("unknown", 0.5, "a causal mask: its own depends on values that are not there"),
    ("none", 1.0, "attention to everything"),
])  # fmt: skip
def test_without_a_mask_that_can_be_asked(name: str, share: float, words: str) -> None:
    slice_ = capture("flex.py", name)[0]
    assert counted_flops(attention(slice_)[0]) == pytest.approx(ALL * share)
    assert any(words in note.text for note in slice_.notes)
