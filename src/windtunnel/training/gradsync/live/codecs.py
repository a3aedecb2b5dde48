"""Codecs: what a gradient is on the wire, each found by its spec.

============  ========  =========================================================================  ========
spec          summable  code, in the order of its bytes (little endian)                            feedback
============  ========  =========================================================================  ========
none          yes       the gradient itself                                                        no
fp16, bf16    yes       each element; fp16 makes infinity of magnitudes above 65,504, in sums too  no
int8          no        float32 scale of each block of 512 | 1 byte an element, its step + 127     yes
sign          no        float32 -mean, +mean of magnitudes | 1 bit an element, set unless below 0  yes
dragonn:R     no        int32 index of each of R x numel places, -1 unused | float32 value of each  yes
============  ========  =========================================================================  ========

The first of several elements in a byte is in its lowest bits; each part is filled up to whole words of four
bytes. How many bytes a code has depends on the number of elements only, so all ranks' codes are of one
size. *Feedback* marks codecs that are biased: without a residual (`feedback`) they lose what they leave out
for ever.

**NaN and infinity** are never hidden: where one rank's gradient has any, what the codes decode to has NaN
or infinity on all ranks, at its own place (none, fp16, bf16; dragonn: one at least), throughout its block
(int8), or throughout the tensor (sign). The tensor is what is encoded at once: of a plan's group all
parameters, or a rank's slice of them; of several that have NaN dragonn may show one.

**Seeds**: `seed_of` gives the same on every host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live import quantised, sparsified
from windtunnel.training.gradsync.model import NONE

SPARSE_MOST = 2**31
"""Elements that a sparse codec cannot take: its indices are int32."""
FAMILIES = (NONE, "fp16", "bf16", "int8", "sign", "dragonn:RATIO")


@dataclass(frozen=True)
class Codec:
    """Plain functions of one way to send gradients.

    ``summable``: codes are tensors whose sum over ranks (an all-reduce) is the code of the sum; others are
    1-D tensors of uint8. ``lossless``: decoding gives what was encoded. ``feedback``: needs a residual.
    ``nbytes(numel)``: of a code of so many elements (for `none`: of float32).
    """

    spec: str
    nbytes: Callable[[int], int]
    _encode: Callable[[Tensor, int], Tensor]
    _add: Callable[[Tensor, Tensor, float], None]
    summable: bool = False
    lossless: bool = False
    feedback: bool = True

    def encode(self, gradient: Tensor, seed: int) -> Tensor:
        """The code of a gradient of any shape, strides and floating dtype, which is not changed; the code may
        share its memory where the codec is lossless."""
        row = gradient.detach().reshape(-1)
        if not self.lossless:
            row = row.float().contiguous()
        if len(row) == 0:
            return row.to(torch.float32 if self.summable else torch.uint8)
        return self._encode(row, seed)

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """``out``, 1-D of any floating dtype, += ``alpha`` x decoded; alpha = -1 leaves the residual."""
        out = out.detach()
        if self.lossless or out.dtype == torch.float32:
            if len(out):
                self._add(code, out, alpha)
        else:
            total = torch.zeros(out.shape, device=out.device)
            self.add(code, total, alpha)
            out.add_(total)

    def decode(self, code: Tensor, out: Tensor) -> None:
        """``out`` = decoded."""
        self.add(code, out.zero_())


def seed_of(seed: int, step: int, index: int, rank: int = 0) -> int:
    """Of the ``index``-th tensor or group in a step: 62 bits. ``rank``: 0 on all where codes are summed."""
    digest = hashlib.blake2b(f"{seed} {step} {index} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def find(spec: str) -> Codec:
    """The codec of a spec such as ``dragonn:0.01``.

    Raises:
        UserError: there is none.
    """
    match spec.split(":"):
        case ["none"]:
            return _cast(spec, None)
        case ["fp16"]:
            return _cast(spec, torch.float16)
        case ["bf16"]:
            return _cast(spec, torch.bfloat16)
        case ["int8"]:
            return Codec(spec, quantised.block_bytes, quantised.encode_blocks, quantised.add_blocks)
        case ["sign"]:
            return Codec(spec, quantised.sign_bytes, quantised.encode_signs, quantised.add_signs)
        case ["dragonn", ratio]:
            return _sparse(spec, _ratio(spec, ratio))
    raise UserError(f"codec {spec!r} is unknown; accepted are {', '.join(FAMILIES)}")


def _cast(spec: str, dtype: torch.dtype | None) -> Codec:
    def add(code: Tensor, out: Tensor, alpha: float) -> None:
        out.add_(code, alpha=alpha)

    return Codec(
        spec, lambda numel: (2 if dtype else 4) * numel, lambda row, seed: row.to(dtype or row.dtype), add,
        summable=True, lossless=dtype is None, feedback=False,
    )  # fmt: skip


def _sparse(spec: str, ratio: float) -> Codec:
    def nbytes(numel: int) -> int:
        if numel >= SPARSE_MOST:
            raise UserError(f"codec {spec}: {numel} elements at once; fewer than 2^31 are accepted")
        return 8 * sparsified.room_of(numel, ratio)

    return Codec(spec, nbytes, partial(sparsified.encode, ratio=ratio), sparsified.add)


def _ratio(spec: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise UserError(f"codec {spec!r}: {text!r} is not a number above 0 and up to 1")
    return ratio
