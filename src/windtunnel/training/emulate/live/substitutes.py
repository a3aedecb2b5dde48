"""What an absent device cannot do, done by something else.

Operators without a shape function are refused by the native library; here those get one that only builds with
CUDA have, and those are refused whose shape depends on data.

``torch.compile`` is a declared approximation. Compiling for a device that is not there is not possible, so a
compiled function runs eagerly while its operators carry the number of their region, and which blocks of
memory they read and write is written down. What the compiler would have made of them, in time and memory, is
worked out afterwards (`windtunnel.training.emulate.twin.compiler`). Only functional collectives differ as
they run: in a traced graph the wait stands right behind the collective, and Inductor leaves it there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules._functions import SyncBatchNorm

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.native_library import unrecorded
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.patches import replaces

WHY = "the size of its result depends on device data"
DATA_DEPENDENT = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")


def install_shapes(note: Any) -> None:
    """Add them to the Meta kernels. ``note`` takes one sentence for the report. Call once."""
    library = torch.library.Library("aten", "IMPL", "Meta")

    def bincount(values: Any, weights: Any = None, minlength: int = 0) -> Any:
        if minlength <= 0:
            refuse("torch.bincount without minlength", f"{WHY}; pass minlength")()
        note("torch.bincount: no value is taken to lie beyond minlength")
        dtype = (
            torch.int64
            if weights is None
            else (torch.float32 if weights.dtype == torch.float32 else torch.float64)
        )
        return torch.empty(minlength, dtype=dtype, device="meta")

    def flatten_weight(weights: Any, *args: Any) -> Any:
        return weights[0].new_empty(sum(math.prod(w.shape) for w in weights))

    def rnn_backward(input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, *args: Any) -> Any:
        mask = args[-1]
        return (
            torch.empty_like(input) if mask[0] else None,
            torch.empty_like(hx) if mask[1] else None,
            torch.empty_like(cx) if mask[2] and cx is not None else None,
            [torch.empty_like(w) for w in weight] if mask[3] else [],
        )

    # SyncBatchNorm's kernels: statistics are kept in float32, one a channel (dimension 1).
    def channels(input: Any) -> Any:
        return input.new_empty(input.shape[1], dtype=torch.promote_types(input.dtype, torch.float32))

    def stats(input: Any, *args: Any) -> Any:
        return channels(input), channels(input)

    def elementwise(input: Any, *args: Any) -> Any:
        return torch.empty_like(input)

    def backward_reduce(
        grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, to_input: bool, to_weight: bool,
        to_bias: bool,
    ) -> Any:  # fmt: skip
        sums = (channels(input), channels(input)) if to_input else (None, None)
        like = weight if weight is not None else mean
        return (
            *sums,
            torch.empty_like(like) if to_weight else None,
            torch.empty_like(like) if to_bias else None,
        )

    library.impl("batch_norm_stats", stats)
    library.impl("batch_norm_gather_stats", stats)
    library.impl("batch_norm_gather_stats_with_counts", stats)
    library.impl("batch_norm_elemt", elementwise)
    library.impl("batch_norm_backward_elemt", elementwise)
    library.impl("batch_norm_backward_reduce", backward_reduce)

    def repeat_interleave(repeats: Any, *, output_size: int | None = None) -> Any:
        if output_size is None:
            refuse("repeat_interleave without output_size", f"{WHY}; pass output_size")()
        return repeats.new_empty(output_size)

    for name in DATA_DEPENDENT:
        library.impl(name, refuse(f"aten.{name}", WHY), allow_override=True)
    library.impl("repeat_interleave.Tensor", repeat_interleave, allow_override=True)
    library.impl("bincount", bincount)
    library.impl("_cudnn_rnn_flatten_weight", flatten_weight)
    library.impl("_cudnn_rnn_backward", rnn_backward)
    _keep.append(library)
    _keep_all_ranks()


def _keep_all_ranks() -> None:
    """SyncBatchNorm leaves ranks without input out of its statistics, by a mask whose size depends on data;
    it does not while a CUDA graph is captured. Here no rank is without input."""
    cuda: Any = torch.cuda
    capturing = cuda.is_current_stream_capturing

    @replaces(SyncBatchNorm)
    def forward(original: Any, *args: Any) -> Any:
        cuda.is_current_stream_capturing = lambda: True
        try:
            return original(*args)
        finally:
            cuda.is_current_stream_capturing = capturing


_keep: list[Any] = []  # a library's kernels go with it


def install_finite(observer: Observer) -> None:
    """What is not known is taken to be finite, as by the scaler of mixed precision, and right where PyTorch
    checks an argument (`torch.distributions`): else a script would take no step. Call once."""

    def is_finite(original: Any, tensor: torch.Tensor) -> Any:
        result = original(tensor)
        local = getattr(result, "_local_tensor", result)
        if local.is_cuda:
            with unrecorded(observer.native), torch.no_grad():
                if not (local | ~local).all().item():  # what is not known is neither
                    local.fill_(True)
                    observer.note(FINITE, NoteKind.APPROXIMATION)
        return result

    for holder in (torch, torch.Tensor):
        replaces(holder, "isfinite", "_is_all_true")(is_finite)


FINITE = "values that are not there are taken to be finite, and right where PyTorch checks them"


REMEMBERED = 4096
"""Calls of compiled regions whose backward pass may still come; the oldest are forgotten."""


def install_compiler(observer: Observer) -> None:
    """Replace ``torch.compile``. Call once, before the script runs."""
    note = (
        "torch.compile runs eagerly; kernels, kept activations and memory of its regions are what a model of"
        " Inductor makes of them"
    )
    native = observer.native

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        observer.regions += 1
        region = observer.regions

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            observer.note(note, NoteKind.APPROXIMATION)
            if observer.in_region:  # what is compiled as a part of what is compiled has no graph of its own
                return function(*args, **kwargs)
            observer.in_region = True
            native.wt_region(region)
            first = get_sequence()
            try:
                return function(*args, **kwargs)
            finally:
                native.wt_region(0)
                observer.in_region = False
                traced.append((first, get_sequence()))

        return inside

    get_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
    # Numbers of the autograd nodes that the latest calls of regions made: [first, end).
    traced: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def in_graph() -> bool:
        """Whether a region is under way, or the backward pass of one."""
        if observer.in_region or not traced:
            return observer.in_region
        node = torch._C._current_autograd_node()
        if node is None:
            return False
        number = node._sequence_nr()
        return any(first <= number < end for first, end in reversed(traced))

    @replaces(functional)
    def _maybe_wrap_tensor(wrap: Any, tensor: torch.Tensor) -> Any:
        return functional.wait_tensor(tensor) if in_graph() else wrap(tensor)

    @replaces(torch)
    def compile(_: Any, model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda program: compile(_, program, **options)
        if not compiles(**options):
            return model
        if isinstance(model, torch.nn.Module):
            with contextlib.suppress(Exception):  # the module as it was, of the same parameters and parts
                object.__setattr__(model, "_orig_mod", copy.copy(model))
            model.compile()
            return model
        return mark(model)

    @replaces(torch.nn.Module, "compile")
    def compile_module(_: Any, self: Any, *args: Any, **options: Any) -> None:
        if not compiles(**options):
            return
        own = getattr(self.forward, "__self__", None) is self
        # as a method, which a copy of the module has of itself
        self.forward = MethodType(mark(self.forward.__func__), self) if own else mark(self.forward)


def compiles(disable: bool = False, backend: Any = "inductor", **options: Any) -> bool:
    """Whether kernels come of it, by the options of ``torch.compile`` and its variables."""
    switched_off = any(os.environ.get(f"{name}_DISABLE") == "1" for name in ("TORCH_COMPILE", "TORCHDYNAMO"))
    return not (disable or backend == "eager" or switched_off)


def install_shortcuts() -> None:
    """What PyTorch works out for every parameter anew is worked out once for those that are alike: the same
    comes out, and a large job is emulated with many ranks. Call once. What another version of PyTorch does
    not have is left as it is."""
    for function in (_strategies_once, _sizes_once, _meshes_compared):
        with contextlib.suppress(AttributeError):
            function()


def _strategies_once() -> None:
    """The ways to shard one tensor of a list are those of each that has its shape and placements."""
    strategies: dict[Any, Any] = {}

    @replaces(utils)
    def expand_to_full_mesh_op_strategy(
        expand: Any, mesh: Any, op_schema: Any, single: Any, **options: Any
    ) -> Any:
        meta = options.get("output_tensor_meta")
        key_options = {**options, "output_tensor_meta": tuple(meta) if isinstance(meta, list) else meta}
        try:
            key = (mesh, op_schema, tuple(map(tuple, single)), tuple(key_options.items()))
            if key not in strategies:
                strategies[key] = expand(mesh, op_schema, single, **options)
            return strategies[key]
        except TypeError:  # a part of the key has no hash
            return expand(mesh, op_schema, single, **options)


def _sizes_once() -> None:
    """How much a rank has of a dimension that is sharded by strides is found by sharding a list of all its
    places, in as many parts as there are ranks."""
    sizes: dict[tuple[Any, ...], tuple[int, int | None]] = {}

    @replaces(_StridedShard)
    def local_shard_size_and_offset(
        size_of: Any, self: Any, size: Any, chunks: Any, rank: Any, *mode: Any, **more: Any
    ) -> Any:
        plain = type(size) is int and type(rank) is int and mode in ((), (0,), (2,)) and not more
        if not plain or torch.get_default_device().type != "cpu":  # elsewhere each is an operator
            return size_of(self, size, chunks, rank, *mode, **more)
        key = self, size, chunks, rank, *mode
        if key not in sizes:
            sizes[key] = size_of(*key)
        return sizes[key]


def _meshes_compared() -> None:
    """Meshes are compared by the numbers of all ranks of the world: those that were equal have one list of
    them from then on."""
    others = ("_layout", "_device_type", "_mesh_dim_names", "_thread_id")

    @replaces(DeviceMesh, "__eq__")
    def compared(equal: Any, self: Any, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return bool(equal(self, other))
        mesh: Any = other
        if self._flatten_rank_map is not mesh._flatten_rank_map:
            if self._flatten_rank_map != mesh._flatten_rank_map:
                return False
            mesh._flatten_rank_map = self._flatten_rank_map
        return all(getattr(self, name) == getattr(mesh, name) for name in others)
