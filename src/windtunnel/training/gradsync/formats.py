"""What a gradient is on the wire: the codecs that there are, each by its spec, for who makes codes and who
prices them.

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
size. *Feedback* marks codecs that are biased: without a residual (`live.feedback`) they lose what they leave
out for ever.

`steps` has what training takes with each to a loss. Those are the codecs that are measured and emulated
where none are named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.model import NONE

FAMILIES = (NONE, "fp16", "bf16", "int8", "sign", "dragonn:RATIO")
STEPS = "steps.json"
BLOCK = 512
"""Elements of int8 that have one scale."""
SPARSE_MOST = 2**31
"""Elements that a sparse codec cannot take: its indices are int32."""


@dataclass(frozen=True)
class CodeFormat:
    """One way to send gradients.

    ``nbytes(numel)``: of a code of so many elements (for `none`: of float32). ``summable``: codes are tensors
    whose sum over ranks (an all-reduce) is the code of the sum; others are 1-D tensors of uint8.
    ``lossless``: decoding gives what was encoded. ``feedback``: needs a residual. ``ratio``: of the elements
    that are sent, 1 where all are.
    """

    spec: str
    nbytes: Callable[[int], int]
    summable: bool = False
    lossless: bool = False
    feedback: bool = True
    ratio: float = 1.0


def format_of(spec: str) -> CodeFormat:
    """The format of a spec such as ``dragonn:0.01``.

    Raises:
        UserError: there is none.
    """
    match spec.split(":"):
        case ["none"]:
            return CodeFormat(spec, lambda numel: 4 * numel, summable=True, lossless=True, feedback=False)
        case ["fp16" | "bf16"]:
            return CodeFormat(spec, lambda numel: 2 * numel, summable=True, feedback=False)
        case ["int8"]:
            return CodeFormat(spec, block_bytes)
        case ["sign"]:
            return CodeFormat(spec, sign_bytes)
        case ["dragonn", text]:
            ratio = _ratio(spec, text)
            return CodeFormat(spec, lambda numel: 8 * room_of(numel, ratio), ratio=ratio)
    raise UserError(f"codec {spec!r} is unknown; accepted are {', '.join(FAMILIES)}")


def _ratio(spec: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise UserError(f"codec {spec!r}: {text!r} is not a number above 0 and up to 1")
    return ratio


def block_bytes(numel: int) -> int:
    """A scale a block, then a byte an element, in whole words of four."""
    return 4 * (-(-numel // BLOCK) + -(-numel // 4))


def sign_bytes(numel: int) -> int:
    """Two values, then a bit an element, in whole words of four."""
    return 8 + 4 * -(-numel // 32) if numel else 0


def room_of(numel: int, ratio: float) -> int:
    """Elements that a code of ``numel`` has room for.

    Raises:
        UserError: there are more than an index can number.
    """
    if numel >= SPARSE_MOST:
        raise UserError(f"codec dragonn: {numel} elements at once; fewer than 2^31 are accepted")
    return min(numel, max(1, round(numel * ratio)))


@cache
def steps() -> dict[str, float]:
    """How many steps training needed to a loss with each codec, over those that it needed without: the worse
    of the jobs of ``python -m benchmarks training.gradsync --only steps``."""
    codecs = json.loads(resources.files(__package__).joinpath(STEPS).read_text())["codecs"]
    return {codec: max(mean for mean, _ in jobs.values()) for codec, jobs in codecs.items()}
