"""Flex attention on the absent device: one kernel, of the work that its mask leaves.

Compiled, PyTorch's flex attention is one kernel that passes over blocks of the scores which the mask leaves
empty; run eagerly it would build all scores. Here it is one operator with the kernel's tensors and the share
of blocks that are not empty. That share is found by asking the mask itself (``mask_mod``) for some rows of
some blocks, at places that do not change. A mask that asks for values which are not on the host (documents of
random tokens) counts as causal. What a ``score_mod`` does to a score is part of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention.flex_attention as module

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.fused.kernel import Attention
from windtunnel.training.emulate.live.observe import Observer

ELEMENTS = 1 << 22
"""Of a mask that are looked at, at most."""
ROWS = 8  # of each block, the first and the last among them
PLACES = 4  # in the batch and among the heads, where a mask differs between them
CAUSAL = 0.5


def install(observer: Observer) -> None:
    """Replace ``flex_attention`` and ``create_block_mask``. Call once, before the script runs."""
    flex: Any = module
    original, original_mask = flex.flex_attention, flex.create_block_mask

    def flex_attention(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
        enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
        return_aux: Any = None,
    ) -> Any:  # fmt: skip
        if not query.is_cuda:
            options = {} if return_aux is None else {"return_aux": return_aux}
            return original(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
                **options,
            )  # fmt: skip
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                "Expect query and key/value to have the same number of heads but got "
                f"Hq={query.shape[1]} and Hkv={key.shape[1]}. Try setting enable_gqa=True for GQA."
            )
        share = _share_of(block_mask, observer)
        out, lse = Attention.apply("flex.flex_attention", False, share, tuple, query, key, value)
        if return_aux is not None:
            highest = torch.empty_like(lse) if return_aux.max_scores else None
            return out, flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=highest)
        return (out, lse) if return_lse else out

    def create_block_mask(
        mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = None, BLOCK_SIZE: Any = 128,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        device = torch.device("cuda" if device is None else device)
        if device.type != "cuda":
            return original_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, *args, **options)
        rows, columns = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        shape = (B or 1, H or 1, -(-Q_LEN // rows))
        counts = torch.empty(shape, dtype=torch.int32, device=device)
        indices = torch.empty(*shape, -(-KV_LEN // columns), dtype=torch.int32, device=device)
        return flex.BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=(rows, columns), mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN),
            compute_q_blocks=False,
        )  # fmt: skip

    flex.flex_attention, flex.create_block_mask = flex_attention, create_block_mask


def _share_of(mask: Any, observer: Observer) -> float:
    """The share of ``mask``'s blocks that are not empty, and a sentence for the report."""
    if mask is None:
        said = "flex attention without a block mask is costed as attention to everything"
        observer.note(said, NoteKind.APPROXIMATION)
        return 1.0
    share = getattr(mask, "share_of_blocks", None)
    if share is None:
        observer.native.wt_pause(1)  # none of this is the script's
        try:
            with torch.no_grad():
                share = blocks_left(mask.mask_mod, mask.shape, mask.BLOCK_SIZE)
        finally:
            observer.native.wt_pause(-1)
        mask.share_of_blocks = share
    rows, columns = mask.BLOCK_SIZE
    told = f"the blocks of {rows} × {columns} that its mask leaves: {100 * share:.1f} % of them"
    if share < 0:
        told = "a causal mask: its own depends on values that are not there"
    observer.note(f"flex attention is costed by {told}", NoteKind.APPROXIMATION)
    return float(share if share >= 0 else CAUSAL)


def blocks_left(mask_mod: Any, shape: tuple[int, ...], block: tuple[int, int]) -> float:
    """The share of blocks in which ``mask_mod`` leaves something; -1 where its values are not known.

    ``shape``: batch, heads, queries, keys. Exact where all rows of blocks fit into `ELEMENTS`, up to holes
    between the rows that are asked of a block.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    batch, heads, queries, keys = (int(size) for size in shape)
    batches, chosen = _spread(batch, PLACES), _spread(heads, PLACES)
    each = ROWS * keys * len(batches) * len(chosen)
    rows = [
        min(queries - 1, number * block[0] + step * (block[0] - 1) // (ROWS - 1))
        for number in _spread(-(-queries // block[0]), max(PLACES, ELEMENTS // each))
        for step in range(ROWS)
    ]
    places = [torch.tensor(each).cuda() for each in (batches, chosen, rows, list(range(keys)))]
    with TransformGetItemToIndex():
        flex: Any = module
        left = flex._vmap_for_bhqkv(mask_mod, prefix=())(*places)
    left = left.expand(len(batches), len(chosen), len(rows), keys)
    if not bool((left == left).all().item()):  # what is not known is not known to be itself
        return -1.0
    padded = torch.nn.functional.pad(left.cpu(), (0, -keys % block[1]))
    blocks = padded.unflatten(-1, (-1, block[1])).any(-1).unflatten(2, (-1, ROWS)).any(3)
    return float(blocks.double().mean())


def _spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of ``count`` places, evenly spread."""
    taken = min(count, most)
    return [(2 * number + 1) * count // (2 * taken) for number in range(taken)]
