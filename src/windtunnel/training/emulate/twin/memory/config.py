"""What the user may set of PyTorch's caching allocator, read from a ``PYTORCH_CUDA_ALLOC_CONF`` string.

Two settings are emulated: ``expandable_segments`` and ``max_split_size_mb``, with the defaults and limits of
PyTorch 2.13 (``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDAAllocatorConfig.h``). Keys that only concern
the host (pinned memory, locks) do not change the bytes on the device: they are accepted and have no effect.
Other keys are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.base.errors import UserError

MIB = 1 << 20
UNLIMITED = 1 << 62
LEAST_SPLIT = 20
"""MiB, of a segment of the large pool: blocks of less than one are always split."""

_EFFECTIVE = ("expandable_segments", "max_split_size_mb", "backend")
_HOST_ONLY = (
    "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the caching allocator. ``max_split_size``: blocks of at least so many bytes are never
    split."""

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read ``"key:value,key:value"`` as PyTorch does.

        Raises:
            UserError: PyTorch refuses it, or a key is not emulated.
        """
        settings = dict(_pairs(text))
        expandable, split = (settings.get(key) for key in ("expandable_segments", "max_split_size_mb"))
        if expandable not in (None, "True", "False"):
            raise _refuse("expandable_segments", expandable, "True or False")
        if split is None:
            return cls(expandable == "True")
        if not split.isdecimal() or int(split) < LEAST_SPLIT:
            raise _refuse("max_split_size_mb", split, f"a whole number of MiB, at least {LEAST_SPLIT}")
        return cls(expandable == "True", min(int(split) * MIB, UNLIMITED))


def _refuse(key: str, value: str, accepted: str) -> UserError:
    return UserError(f"PYTORCH_CUDA_ALLOC_CONF: {key}: {value!r} is not accepted, give {accepted}")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at commas, and each part at its first colon."""
    pairs = []
    for part in filter(None, "".join(text.split()).split(",")):
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
