"""Loops of the codecs on a processor: one pass over memory each, where operations of torch take several.

Every function runs on one thread without the GIL. Arrays are NumPy's over the memory of tensors. A float32 is
compared by the bits of its magnitude (*bits*: the array viewed as uint32): they order as magnitudes do, with
infinity above all numbers and NaN above infinity, so that neither is ever overlooked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit, jit_inline

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)


@jit_inline
def mix(value: Any) -> Any:
    """MurmurHash3's finaliser of 32 bits."""
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))


@jit
def to_levels(
    values: Floats, bits: Words, block: int, levels: int, width: int, seed: int, least: float,
    scales: Floats, packed: Bytes,
) -> None:  # fmt: skip
    """Each element as one of ``2 * levels + 1`` even steps of its block's largest magnitude, in ``width``
    bits. ``seed``: rounds up with the probability that leaves the mean as it is; negative: rounds to the
    nearest. A block with nothing of ``least`` or more is zeros, one with NaN or infinity has the scale
    NaN."""
    per = 8 // width
    level = np.empty(block, np.uint8)
    for one in range(len(scales)):
        begin = one * block
        size = min(block, len(values) - begin)
        top = np.uint32(0)
        for i in range(begin, begin + size):
            top = max(top, np.uint32(bits[i] & MAGNITUDE))
        most = np.float32(0.0)
        for i in range(begin, begin + size):
            most = max(most, abs(values[i]))
        if top >= INFINITE or most < least:
            scales[one] = np.nan if top >= INFINITE else 0.0
            level[:] = levels
        else:
            scales[one] = most / np.float32(levels)
            inverse = np.float32(levels) / most
            for i in range(size):
                step = values[begin + i] * inverse + np.float32(levels)
                if seed >= 0:
                    drawn = mix(np.uint32(begin + i) ^ np.uint32(seed)) >> np.uint32(8)
                    step += np.float32(drawn) * np.float32(2**-24)
                else:
                    step += np.float32(0.5)
                level[i] = np.uint8(min(step, np.float32(2 * levels)))
        level[size:] = 0
        first = begin // per
        for byte in range((size + per - 1) // per):
            value = 0
            for j in range(per):
                value |= level[byte * per + j] << (j * width)
            packed[first + byte] = value


@jit
def to_signs(bits: Words, packed: Bytes) -> int:
    """One bit an element: whether its sign bit is not set. How many are not."""
    whole, count = len(bits) // 8, 0
    for byte in range(len(packed)):
        value = 0
        for j in range(8 if byte < whole else len(bits) - byte * 8):
            value |= int((bits[byte * 8 + j] >> np.uint32(31)) ^ np.uint32(1)) << j
        packed[byte] = value
        value -= (value >> 1) & 0x55
        value = (value & 0x33) + ((value >> 2) & 0x33)
        count += (value + (value >> 4)) & 0x0F
    return count


@jit
def add_table(
    packed: Bytes, width: int, table: Floats, scales: Floats, block: int, out: Floats, alpha: float
) -> None:
    """Adds ``alpha`` times the scale of its block times the entry of ``table`` that each element names in
    ``width`` bits."""
    per, mask = 8 // width, (1 << width) - 1
    for one in range(len(scales)):
        factor = np.float32(alpha) * scales[one]
        end = min((one + 1) * block, len(out))
        if width == 8:
            for i in range(one * block, end):
                out[i] += factor * table[packed[i]]
        else:
            for byte in range(one * block // per, (end + per - 1) // per):
                value = packed[byte]
                for i in range(byte * per, min(byte * per + per, end)):
                    out[i] += factor * table[value & mask]
                    value >>= width
