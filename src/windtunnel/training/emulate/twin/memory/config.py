"""What the user may set of PyTorch's caching allocator, read from a ``PYTORCH_CUDA_ALLOC_CONF`` string.

Keys, their defaults and what is refused are those of PyTorch 2.13 (``c10/core/AllocatorConfig.h`` and
``c10/cuda/CUDAAllocatorConfig.h``). All that change the bytes on the device are emulated, the older remedies
for fragmentation too: scripts that are really run set ``max_split_size_mb``, ``roundup_power2_divisions`` and
``garbage_collection_threshold``. This last one PyTorch heeds only where ``per_process_memory_fraction`` sets
a limit: without one it never collects (``DeviceCachingAllocator::malloc``, ``setMemoryFraction``). Keys that
only concern the host (pinned memory, locks) do not change these bytes: they are accepted and have no effect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from windtunnel.base.errors import UserError

MIB = 1 << 20
UNLIMITED = 1 << 62
# roundup_power2_divisions has one entry for each power of two from 1 MiB up to 32 GiB and above.
INTERVALS = 16

_EFFECTIVE = (
    "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb",
    "roundup_power2_divisions", "garbage_collection_threshold", "per_process_memory_fraction", "backend",
)  # fmt: skip
_HOST_ONLY = (
    "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the caching allocator; sizes in bytes.

    ``max_split_size``: blocks of at least this size are not split. ``max_non_split_rounding``: a request of
    at least ``max_split_size`` may take a block that is less than this much larger. ``large_segment_size``:
    segment for requests between 1 and 10 MiB, and the page of expandable segments of the large pool.
    ``roundup_power2_divisions``: into how many parts each interval [2^i MiB, 2^(i+1) MiB) is divided to round
    requests up; 0 and 1 mean rounding to 512 bytes. ``per_process_memory_fraction``: share of the device's
    memory that the allocator may have. ``garbage_collection_threshold``: share of that, where it is less than
    1, above which cached segments are released before a new one is asked for; 0 is never.
    """

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read ``"key:value,key:[a:b,c:d]"`` as PyTorch does; raises `UserError` on what PyTorch refuses."""
        settings = dict(_pairs(text))
        segment = _megabytes(settings, "large_segment_size_mb", 20 * MIB, 11 * MIB)
        return cls(
            expandable_segments=_flag(settings.get("expandable_segments", "False"), "expandable_segments"),
            max_split_size=_megabytes(settings, "max_split_size_mb", UNLIMITED, segment),
            max_non_split_rounding=_megabytes(settings, "max_non_split_rounding_mb", segment, segment),
            large_segment_size=segment,
            roundup_power2_divisions=_divisions(settings.get("roundup_power2_divisions", "0")),
            garbage_collection_threshold=_share(settings, "garbage_collection_threshold", 0.0, below=True),
            per_process_memory_fraction=_share(settings, "per_process_memory_fraction", 1.0),
        )

    @property
    def collects(self) -> bool:
        """Whether PyTorch heeds the threshold: it does within a limit."""
        return self.garbage_collection_threshold > 0 and self.per_process_memory_fraction < 1


def _refuse(key: str, value: str, accepted: str) -> UserError:
    return UserError(f"PYTORCH_CUDA_ALLOC_CONF: {key}: {value!r} is not accepted, give {accepted}")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at the commas that are outside brackets, and each part at its first colon."""
    pairs = []
    for part in filter(None, re.split(r",(?![^\[]*\])", "".join(text.split()))):
        key, colon, value = part.partition(":")
        if key not in _EFFECTIVE and key not in _HOST_ONLY:
            accepted = ", ".join(_EFFECTIVE)
            raise UserError(
                f"PYTORCH_CUDA_ALLOC_CONF: {key!r} is not an emulated option, give any of {accepted}"
            )
        if not colon or not value:
            raise _refuse(key, value, f"a value, as in {key}:VALUE")
        if key == "backend" and value != "native":
            raise _refuse(key, value, "native (the only allocator that is emulated)")
        pairs.append((key, value))
    return pairs


def _flag(value: str, key: str) -> bool:
    if value not in ("True", "False"):
        raise _refuse(key, value, "True or False")
    return value == "True"


def _megabytes(settings: dict[str, str], key: str, default: int, least: int) -> int:
    value = settings.get(key)
    if value is None:
        return default
    if not value.isdecimal() or int(value) * MIB < least:
        raise _refuse(key, value, f"a whole number of MiB, at least {least // MIB}")
    return min(int(value) * MIB, UNLIMITED)


def _share(settings: dict[str, str], key: str, default: float, *, below: bool = False) -> float:
    """A number above 0 up to 1, or ``below`` 1."""
    value = settings.get(key)
    if value is None:
        return default
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0 or (below and share == 1.0):
        raise _refuse(key, value, f"a number above 0.0 and {'below' if below else 'up to'} 1.0")
    return share


def _power_of_two(text: str) -> int:
    """The number in ``text`` if it is a power of two, else -1."""
    number = int(text) if text.isdecimal() else -1
    return number if number > 0 and number & (number - 1) == 0 else -1


def _divisions(value: str) -> tuple[int, ...]:
    """``"4"`` for all sizes, or ``"[256:1,512:2,>:4]"``: from that many MiB on, so many divisions.

    As in PyTorch: the first entry also holds for all below it, ``>`` for everything above the last size
    named, and an interval that is not named is not rounded.
    """
    key, accepted = "roundup_power2_divisions", "a power of two, or a list as in [256:1,512:2,>:4]"
    if value == "0":
        return (0,) * INTERVALS
    if not (value.startswith("[") and value.endswith("]")):
        if _power_of_two(value) < 0:
            raise _refuse(key, value, accepted)
        return (int(value),) * INTERVALS
    divisions, last, first = [0] * INTERVALS, 0, True
    for entry in value[1:-1].split(","):
        size, _, parts = entry.partition(":")
        if (parts != "0" and _power_of_two(parts) < 0) or (size != ">" and _power_of_two(size) < 0):
            raise _refuse(key, value, accepted)
        if size == ">":
            divisions[last + 1 :] = [int(parts)] * (INTERVALS - last - 1)
            continue
        last = min(int(size).bit_length() - 1, INTERVALS - 1)
        if first:
            divisions[:last] = [int(parts)] * last
            first = False
        divisions[last] = int(parts)
    return tuple(divisions)
