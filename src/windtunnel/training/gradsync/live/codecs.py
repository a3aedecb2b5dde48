"""Codecs: what a gradient is on the wire, each found by its spec.

============  ==========  =========================================================================  ========
spec          summable    code, in the order of its bytes (little endian)                            feedback
============  ==========  =========================================================================  ========
none          yes         the gradient itself                                                        no
fp16, bf16    yes         each element; fp16 makes infinity of magnitudes above 65,504, in sums too  no
int8          no          float32 scale of each block of 512 | 1 byte an element, its step + 127     yes
fp8           no          float32 scale of each block of 512 | 1 byte an element, e4m3               yes
terngrad      no          float32 scale of each block of 512 | 2 bits an element, its step + 1       no
qsgd:S        no          as terngrad, S steps to either side: 2 bits (S = 1), 4 (to 7), 8 (to 127)  no
sign          no          float32 -mean, +mean of magnitudes | 1 bit an element, set unless below 0  yes
onebit        no          float32 mean below, above zero | 1 bit an element, set unless below 0     yes
topk:R        no          int32 index of each of R x numel places | float32 value of each            yes
threshold:R   no          as topk, unused places have the index -1                                   yes
dgc:R         no          as threshold                                                               yes
dragonn:R     no          as threshold                                                               yes
randomk:R     yes         float32 value of each of R x numel places; the seed gives the indices      yes
powersgd:N    yes, twice  float32 factors of rank N, see `lowrank`                                   yes
============  ==========  =========================================================================  ========

The first of several elements in a byte is in its lowest bits; each part is filled up to whole words of four
bytes. How many bytes a code has depends on the number of elements only, so all ranks' codes are of one
size. *Feedback* marks codecs that are biased: without a residual (`feedback`) they lose what they leave out
for ever. TernGrad and QSGD are true in the mean and must not have one: their error may exceed the gradient.

**NaN and infinity** are never hidden: where one rank's gradient has any, what the codes decode to has NaN
or infinity on all ranks, at its own place (none, fp16, bf16; sparse: one at least), throughout its block
(int8, fp8, terngrad, qsgd), or throughout the tensor (sign, onebit, powersgd; randomk at the places that it
sends, also where the sum of all elements overflows). The tensor is what is encoded at once: of a plan's
group all parameters, or a rank's slice of them; of several that have NaN sparse codecs may show one.

**Seeds**: `seed_of` gives the same on every host. Ranks take different ones where codes are rounded at
random, or their errors would not cancel, and must take the same one for a summable codec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live import lowrank, quantised, sparsified
from windtunnel.training.gradsync.model import NONE

SPARSE_MOST = 2**31
"""Elements that a sparse codec cannot take: its indices are int32."""


@dataclass(frozen=True)
class Codec:
    """Plain functions of one way to send gradients.

    ``summable``: codes are tensors whose sum over ranks (an all-reduce) is the code of the sum; others are
    1-D tensors of uint8. ``lossless``: decoding gives what was encoded. ``feedback``: needs a residual.
    ``nbytes(numel)``: of a code of so many elements (for `none`: of float32). ``sparse``: codes have indices
    and values (`sparsified.parts`). ``rank``: not 0 for `lowrank.LowRank`, whose two sums `encode` and `add`
    cannot do.
    """

    spec: str
    nbytes: Callable[[int], int]
    _encode: Callable[[Tensor, int], Tensor]
    _add: Callable[[Tensor, Tensor, int, float], None]
    summable: bool = False
    lossless: bool = False
    feedback: bool = True
    sparse: bool = False
    rank: int = 0

    @property
    def family(self) -> str:
        return self.spec.partition(":")[0]

    def encode(self, gradient: Tensor, seed: int) -> Tensor:
        """The code of a gradient of any shape, strides and floating dtype, which is not changed; the code may
        share its memory where the codec is lossless."""
        row = gradient.detach().reshape(-1)
        if not self.lossless:
            row = row.float().contiguous()
        if len(row) == 0 and not self.rank:
            return row.to(torch.float32 if self.summable else torch.uint8)
        return self._encode(row, seed)

    def add(self, code: Tensor, out: Tensor, seed: int = 0, alpha: float = 1.0) -> None:
        """``out``, 1-D of any floating dtype, += ``alpha`` x decoded; alpha = -1 leaves the residual."""
        out = out.detach()
        if self.lossless or out.dtype == torch.float32:
            if len(out) or self.rank:
                self._add(code, out, seed, alpha)
        else:
            total = torch.zeros(out.shape, device=out.device)
            self.add(code, total, seed, alpha)
            out.add_(total)

    def decode(self, code: Tensor, out: Tensor, seed: int = 0) -> None:
        """``out`` = decoded."""
        self.add(code, out.zero_(), seed)


def seed_of(seed: int, step: int, index: int, rank: int = 0) -> int:
    """Of the ``index``-th tensor or group in a step: 62 bits. ``rank``: 0 on all where codes are summed."""
    told = hashlib.blake2b(f"{seed} {step} {index} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(told, "little") >> 2


def find(spec: str) -> Codec:
    """The codec of a spec such as ``topk:0.01``.

    Raises:
        UserError: there is none.
    """
    family, colon, argument = spec.partition(":")
    takes, build = FAMILIES.get(family, ("", None))
    if build is None or bool(colon) != bool(takes):
        accepted = ", ".join(f"{name}:{one}" if one else name for name, (one, _) in FAMILIES.items())
        raise UserError(f"codec {spec!r} is unknown; accepted are {accepted}")
    if not takes:
        return build(spec, 0)
    parse, fits, told = ARGUMENTS[takes]
    try:
        number = parse(argument)
    except ValueError:
        number = -1
    if not fits(number):
        raise UserError(f"codec {spec!r}: {argument!r} is not {told}")
    return build(spec, number)


def _cast(spec: str, _: float, dtype: torch.dtype | None = None) -> Codec:
    def add(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        out.add_(code, alpha=alpha)

    return Codec(
        spec, lambda numel: (2 if dtype else 4) * numel, lambda row, seed: row.to(dtype or row.dtype), add,
        summable=True, lossless=dtype is None, feedback=False,
    )  # fmt: skip


def _levels(spec: str, levels: float, random: bool = True) -> Codec:
    width = 2 if levels == 1 else 4 if levels <= 7 else 8
    encode = partial(quantised.encode_levels, levels=int(levels), width=width, random=random)
    return _blocks(spec, encode, quantised.levels_table(int(levels), width), width, not random)


def _blocks(
    spec: str, encode: Callable[[Tensor, int], Tensor], table: Tensor, width: int, feedback: bool
) -> Codec:
    nbytes = partial(quantised.block_bytes, width=width)
    return Codec(
        spec, nbytes, encode, partial(quantised.add_blocks, table=table, width=width), feedback=feedback
    )


def _signs(spec: str, _: float) -> Codec:
    return Codec(
        spec, lambda numel: 8 + quantised.room(numel, 1) if numel else 0,
        partial(quantised.encode_signs, two=spec == "onebit"), quantised.add_signs,
    )  # fmt: skip


def _sparse(spec: str, ratio: float, encode: Callable[..., Tensor]) -> Codec:
    def nbytes(numel: int) -> int:
        if numel >= SPARSE_MOST:
            raise UserError(f"codec {spec}: {numel} elements at once; fewer than 2^31 are accepted")
        return 8 * sparsified.kept(numel, ratio)

    return Codec(spec, nbytes, partial(encode, ratio=ratio), sparsified.add_chosen, sparse=True)


def _random(spec: str, ratio: float) -> Codec:
    return Codec(
        spec, lambda numel: 4 * sparsified.kept(numel, ratio),
        partial(sparsified.encode_drawn, ratio=ratio), sparsified.add_drawn, summable=True,
    )  # fmt: skip


def _low_rank(spec: str, rank: float) -> Codec:
    def none(*_: object) -> Tensor:
        raise UserError(f"codec {spec} takes two sums, one after another: live.lowrank has them")

    def nbytes(numel: int) -> int:
        return lowrank.nbytes(int(rank), (lowrank.square(numel),))

    return Codec(spec, nbytes, none, none, summable=True, rank=int(rank))  # type: ignore[arg-type]


_reached = partial(sparsified.encode_reached, hashed=False)
ARGUMENTS: Mapping[str, tuple[Callable[[str], float], Callable[[float], bool], str]] = {
    "RATIO": (float, lambda ratio: 0 < ratio <= 1, "a number above 0 and up to 1"),
    "STEPS": (int, lambda steps: 1 <= steps <= 127, "one of 1 to 127"),
    "RANK": (int, lambda rank: rank >= 1, "a number from 1 on"),
}
FAMILIES: Mapping[str, tuple[str, Callable[[str, float], Codec]]] = {
    NONE: ("", _cast),
    "fp16": ("", partial(_cast, dtype=torch.float16)),
    "bf16": ("", partial(_cast, dtype=torch.bfloat16)),
    "int8": ("", lambda spec, _: _levels(spec, 127, random=False)),
    "fp8": ("", lambda spec, _: _blocks(spec, quantised.encode_float8, quantised.float8_table(), 8, True)),
    "terngrad": ("", lambda spec, _: _levels(spec, 1)),
    "qsgd": ("STEPS", _levels),
    "sign": ("", _signs),
    "onebit": ("", _signs),
    "topk": ("RATIO", partial(_sparse, encode=sparsified.encode_largest)),
    "threshold": ("RATIO", partial(_sparse, encode=_reached)),
    "dgc": ("RATIO", partial(_sparse, encode=_reached)),
    "dragonn": ("RATIO", partial(_sparse, encode=partial(sparsified.encode_reached, hashed=True))),
    "randomk": ("RATIO", _random),
    "powersgd": ("RANK", _low_rank),
}
"""By family: what follows the colon, "" where there is none, and what makes the codec of a spec."""
