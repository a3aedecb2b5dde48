"""What stands in for things that an absent device cannot do: compiling, the script's own operators, saving.

``torch.compile`` and flex attention are declared approximations. Compiling for a device that is not there is
not possible, so a compiled function runs eagerly while its operators carry the number of their region. The
cost model fuses neighbouring elementwise operators of a region as the compiler would; memory is that of eager
mode, an upper bound.

Operators that the script brings (``torch.library.custom_op``) are answered by their fake implementation:
their kernels are written for a device that is not there; the fake implementation says what comes out. Such an
operator is recorded under its own name and costed by the bytes that it reads and writes.

What a script saves goes to the host, as it would, and no further: the weights of a device that is not there
have no values, and a file of zeros must never take the place of a real checkpoint. What is read back
(``torch.load``, ``torch.distributed.checkpoint.load``) is read for real.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.graph import EventKind, NoteKind
from windtunnel.training.emulate.live.observe import Observer


def install_compiler(observer: Observer) -> None:
    """Replace ``torch.compile`` and flex attention. Call once, before the script runs."""
    note = (
        "torch.compile runs eagerly; neighbouring elementwise operators of a compiled region are costed as "
        "one kernel"
    )
    native = observer.native

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        observer.regions += 1
        region = observer.regions

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            native.wt_region(region)
            try:
                return function(*args, **kwargs)
            finally:
                native.wt_region(0)

        return inside

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda given: compile(given, **options)
        observer.note(note, NoteKind.APPROXIMATION)
        if isinstance(model, torch.nn.Module):
            model.forward = mark(model.forward)
            return model
        return mark(model)

    def compile_module(self: torch.nn.Module, *args: Any, **options: Any) -> None:
        observer.note(note, NoteKind.APPROXIMATION)
        self.forward = mark(self.forward)  # type: ignore[method-assign]

    torch.compile = compile  # type: ignore[assignment]
    torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
    _replace_flex_attention(observer)


def _replace_flex_attention(observer: Observer) -> None:
    try:
        import torch.nn.attention.flex_attention as module
    except ImportError:
        return
    flex: Any = module

    def flex_attention(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
        enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, **extra: Any,
    ) -> Any:  # fmt: skip
        observer.note(
            "flex_attention is costed as flash attention; a block mask counts as causal",
            NoteKind.APPROXIMATION,
        )
        if enable_gqa:
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        causal = block_mask is not None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return (out, lse) if return_lse else out

    def create_block_mask(
        mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = "cuda", BLOCK_SIZE: Any = 128,
        **extra: Any,
    ) -> Any:  # fmt: skip
        size = BLOCK_SIZE if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE[0]
        rows, columns = -(-Q_LEN // size), -(-KV_LEN // size)
        counts = torch.empty(B or 1, H or 1, rows, dtype=torch.int32, device=device)
        indices = torch.empty(B or 1, H or 1, rows, columns, dtype=torch.int32, device=device)
        return flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=size, mask_mod=mask_mod,
                                             seq_lengths=(Q_LEN, KV_LEN), compute_q_blocks=False)  # fmt: skip

    flex.flex_attention = flex_attention
    flex.create_block_mask = create_block_mask


ON_DEVICE = (None, "cuda")  # device types for which an implementation may be registered that the device runs


def install_operators(native: ctypes.CDLL) -> None:
    """Let fake implementations stand for kernels wherever there is one. Call once."""
    definition: Any = CustomOpDef
    register_fake, register_kernel = definition.register_fake, definition.register_kernel
    rows: dict[str, int] = {}

    def record(name: str, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [_describe(value) for value in (*args, *kwargs.values())]
        outputs = [_describe(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        text = json.dumps({"n": name, "i": inputs, "o": outputs, "r": 0})
        if text not in rows:
            rows[text] = int(native.wt_add_operator(text.encode()))
        native.wt_event(int(EventKind.OP), native.wt_stream(), rows[text], 0)

    def stand_in(operator: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if not any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
                return real(*args, **kwargs)
            out = operator._abstract_fn(*args, **kwargs)
            record(str(operator._opoverload), args, kwargs, out)
            return out

        call.stands_in = True  # type: ignore[attr-defined]
        return call

    def replace(operator: Any) -> None:
        for kind in ON_DEVICE:
            real = operator._backend_fns.get(kind)
            if real is not None and operator._abstract_fn is not None and not hasattr(real, "stands_in"):
                operator._backend_fns[kind] = stand_in(operator, real)

    def fake(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = register_fake(self, fn, *args, **kwargs)
        replace(self)
        return result

    def kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        if fn is None:
            return lambda given: kernel(self, device_types, given)
        result = register_kernel(self, device_types, fn)
        replace(self)
        return result

    definition.register_fake, definition.register_kernel = fake, kernel


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        told = {
            "t": str(value.dtype).removeprefix("torch."),
            "s": list(value.shape),
            "d": list(value.stride()),
        }
        return told if value.is_cuda else {**told, "c": 1}
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    return value if isinstance(value, int | float | bool | str | type(None)) else None


def install_saving(note: Callable[[str], None]) -> None:
    """Replace the functions that write checkpoints. ``note`` takes one sentence for the report. Call once."""
    original = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not device_tensors(obj):
            original(obj, f, *args, **kwargs)
            return
        copy_to_host(obj)
        note("torch.save: device tensors are copied to the host and not written")

    def save_sharded(state_dict: Any, *args: Any, **kwargs: Any) -> None:
        copy_to_host(state_dict)
        note("torch.distributed.checkpoint.save: device tensors are copied to the host and not written")

    def save_later(state_dict: Any, *args: Any, **kwargs: Any) -> concurrent.futures.Future[None]:
        save_sharded(state_dict)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done

    torch.save = save
    for module in (checkpoint, checkpoint.state_dict_saver):
        writers: Any = module
        writers.save = writers.save_state_dict = save_sharded
        writers.async_save = save_later


def device_tensors(value: Any) -> list[torch.Tensor]:
    """The local tensors on the device among what is to be saved; objects with a ``state_dict`` are asked for
    it."""
    found = []
    for leaf in tree_leaves(value):
        local = getattr(leaf, "_local_tensor", leaf)
        if isinstance(local, torch.Tensor):
            found.extend([local] if local.is_cuda else [])
        elif hasattr(local, "state_dict"):
            found.extend(device_tensors(local.state_dict()))
    return found


def copy_to_host(value: Any) -> None:
    """Copy every device tensor to the host, one after another, as saving does."""
    for tensor in device_tensors(value):
        tensor.detach().cpu()
