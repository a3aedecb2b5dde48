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
sends, also where the sum of all elements overflows).

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


@dataclass(frozen=True)
class Codec:
    """Plain functions of one way to send gradients.

    ``summable``: codes are tensors whose sum over ranks (an all-reduce) is the code of the sum; others are
    1-D tensors of uint8. ``lossless``: decoding gives what was encoded. ``feedback``: needs a residual.
    ``nbytes(numel)``: of a code of so many elements (for `none`: of float32).
    ``encode(gradient, seed)``: a gradient of any shape, strides and floating dtype; it is not changed, and
    the code may share its memory where the codec is lossless. ``add(code, out, seed, alpha)``: adds ``alpha``
    times what the code stands for into a 1-D tensor of any floating dtype; alpha = -1 leaves the residual.
    ``indices``: of sparse codes, those that were sent, -1 in places that are unused; None of dense ones.
    ``rank``: not 0 for `lowrank.LowRank`, whose two sums `encode` and `add` cannot do.
    """

    spec: str
    summable: bool
    lossless: bool
    feedback: bool
    nbytes: Callable[[int], int]
    encode: Callable[[Tensor, int], Tensor]
    _add: Callable[[Tensor, Tensor, int, float], None]
    indices: Callable[[Tensor], Tensor] | None = None
    rank: int = 0

    @property
    def family(self) -> str:
        return self.spec.partition(":")[0]

    def add(self, code: Tensor, out: Tensor, seed: int = 0, alpha: float = 1.0) -> None:
        """``out`` += ``alpha`` x decoded."""
        self._add(code, out, seed, alpha)

    def decode(self, code: Tensor, out: Tensor, seed: int = 0) -> None:
        """``out`` = decoded."""
        self._add(code, out.zero_(), seed, 1.0)


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
    if family not in FAMILIES or bool(colon) != (FAMILIES[family].takes != ""):
        accepted = ", ".join(f"{name}:{one.takes}" if one.takes else name for name, one in FAMILIES.items())
        raise UserError(f"codec {spec!r} is unknown; accepted are {accepted}")
    try:
        return FAMILIES[family].build(spec, argument)
    except ValueError:
        raise UserError(f"codec {spec!r}: {argument!r} is not {TAKEN[FAMILIES[family].takes]}") from None


def _plain(
    encode: Callable[[Tensor, int], Tensor], dtype: torch.dtype = torch.uint8
) -> Callable[[Tensor, int], Tensor]:
    """For encoders of one contiguous row of float32 that is not empty; ``dtype``: of codes."""

    def encoded(gradient: Tensor, seed: int) -> Tensor:
        if gradient.numel() == 0:
            return torch.empty(0, dtype=dtype, device=gradient.device)
        return encode(gradient.detach().reshape(-1).float().contiguous(), seed)

    return encoded


def _added(
    add: Callable[[Tensor, Tensor, int, float], None],
) -> Callable[[Tensor, Tensor, int, float], None]:
    """For functions that add into one contiguous row of float32 that is not empty."""

    def added(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        if out.numel() == 0:
            return
        if out.dtype == torch.float32 and out.is_contiguous():
            add(code, out.detach(), seed, alpha)
        else:
            total = torch.zeros(out.shape, device=out.device)
            add(code, total, seed, alpha)
            out.detach().add_(total)

    return added


def _cast(spec: str, argument: str) -> Codec:
    dtype = {NONE: None, "fp16": torch.float16, "bf16": torch.bfloat16}[spec]

    def encode(gradient: Tensor, seed: int) -> Tensor:
        return gradient.detach().reshape(-1).to(dtype or gradient.dtype)

    def add(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        out.detach().add_(code, alpha=alpha)

    width = 4 if dtype is None else 2
    return Codec(spec, True, dtype is None, False, lambda numel: width * numel, encode, add)


def _blocks(spec: str, argument: str) -> Codec:
    width, feedback = 8, True
    if spec == "fp8":
        table = quantised.float8_table()
        encode: Callable[[Tensor, int], Tensor] = quantised.encode_float8
    else:
        levels, feedback = 127, spec == "int8"
        if not feedback:
            levels = 1 if spec == "terngrad" else int(argument)
            if not 1 <= levels <= 127:
                raise ValueError(argument)
            width = 2 if levels == 1 else 4 if levels <= 7 else 8
        table = quantised.levels_table(levels, width)
        encode = partial(quantised.encode_levels, levels=levels, width=width, random=not feedback)

    def add(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        quantised.add_blocks(code, out, alpha, table, width)

    nbytes = partial(quantised.block_bytes, width=width)
    return Codec(spec, False, False, feedback, nbytes, _plain(encode), _added(add))


def _signs(spec: str, argument: str) -> Codec:
    def nbytes(numel: int) -> int:
        return 8 + quantised.room(numel, 1) if numel else 0

    def add(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        quantised.add_signs(code, out, alpha)

    encode = partial(quantised.encode_signs, two=spec == "onebit")
    return Codec(spec, False, False, True, nbytes, _plain(encode), _added(add))


def _ratio(argument: str) -> float:
    ratio = float(argument)
    if not 0 < ratio <= 1:
        raise ValueError(argument)
    return ratio


def _sparse(spec: str, argument: str) -> Codec:
    ratio, family = _ratio(argument), spec.partition(":")[0]

    def nbytes(numel: int) -> int:
        if numel >= 2**31:
            raise UserError(f"codec {spec}: {numel} elements at once; fewer than 2^31 are accepted")
        return 8 * sparsified.kept(numel, ratio)

    encode = partial(sparsified.encode_reached, ratio=ratio, hashed=family == "dragonn")
    if family == "topk":
        encode = partial(sparsified.encode_largest, ratio=ratio)
    return Codec(
        spec, False, False, True, nbytes, _plain(encode), _added(sparsified.add_chosen),
        indices=lambda code: sparsified.parts(code)[0],
    )  # fmt: skip


def _random(spec: str, argument: str) -> Codec:
    ratio = _ratio(argument)
    return Codec(
        spec, True, False, True, lambda numel: 4 * sparsified.kept(numel, ratio),
        _plain(partial(sparsified.encode_drawn, ratio=ratio), torch.float32), _added(sparsified.add_drawn),
    )  # fmt: skip


def _low_rank(spec: str, argument: str) -> Codec:
    rank = int(argument)
    if rank < 1:
        raise ValueError(argument)

    def nbytes(numel: int) -> int:
        return lowrank.nbytes(rank, (lowrank.square(numel),))

    def none(*_: object) -> Tensor:
        raise UserError(f"codec {spec} takes two sums, one after another: live.lowrank has them")

    def add(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        none()

    return Codec(spec, True, False, True, nbytes, none, add, rank=rank)


@dataclass(frozen=True, slots=True)
class Family:
    """``takes``: what follows the colon, "" where there is none."""

    build: Callable[[str, str], Codec]
    takes: str = ""


TAKEN = {"RATIO": "a number above 0 and up to 1", "STEPS": "one of 1 to 127", "RANK": "a number from 1 on"}

FAMILIES: Mapping[str, Family] = {
    NONE: Family(_cast), "fp16": Family(_cast), "bf16": Family(_cast),
    "int8": Family(_blocks), "fp8": Family(_blocks), "terngrad": Family(_blocks),
    "qsgd": Family(_blocks, "STEPS"), "sign": Family(_signs), "onebit": Family(_signs),
    "topk": Family(_sparse, "RATIO"), "threshold": Family(_sparse, "RATIO"),
    "dgc": Family(_sparse, "RATIO"), "dragonn": Family(_sparse, "RATIO"),
    "randomk": Family(_random, "RATIO"), "powersgd": Family(_low_rank, "RANK"),
}  # fmt: skip
