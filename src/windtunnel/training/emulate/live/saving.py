"""Checkpoints: what a script saves goes to the host, as it would, and no further.

The weights of a device that is not there have no values: a file of zeros must never take the place of a real
checkpoint. What is read back (``torch.load``, ``torch.distributed.checkpoint.load``) is read for real.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.utils._pytree import tree_leaves


def install(note: Callable[[str], None]) -> None:
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
