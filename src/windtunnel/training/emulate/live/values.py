"""What ranks say to each other, beside shapes: Python objects, and the values of small tensors.

*Objects* of object collectives go through the mailbox. Arguments are looked at as PyTorch does, so that the
script meets the same errors. An object is pickled by the rank that says it: what cannot be pickled fails
there.

*Values*: sizes, counts, flags and seeds travel in tensors that are broadcast, scattered, sent and gathered.
Where the sender's host knows what is in such a tensor (it came from the host), the receiver gets just that.
On the device nothing waits for it: the receiver's tensor holds a promise, and the sender is asked when the
host reads it. So nobody waits for weights or losses, whose values nobody knows. Tensors on the host (gloo)
are filled at once. The native library calls in here with the small tensors of c10d's operators
(`native/collectives.cpp`). Large host tensors have none until somebody looks (`install_untouched`).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.patches import replaces
from windtunnel.training.emulate.live.world import WorldView
from windtunnel.training.emulate.policy.groups import ranks_words


def install_objects(world: WorldView) -> None:
    """Replace ``torch.distributed``'s object collectives. Call once."""
    checks: Any = c10d
    mailbox = world.mailbox

    def members(group: Any) -> list[int]:
        return list(c10d.get_process_group_ranks(group))

    def root(group: Any, place_or_rank: Any, group_argument: Any) -> int:
        """The place in the group of a source or destination, as collectives take it: rank 0 by default."""
        if place_or_rank is None and group_argument is None:
            place_or_rank = 0
        return int(checks._canonicalize_group_rank(group, place_or_rank, group_argument))

    def peer(group: Any, place_or_rank: Any, group_argument: Any, what: str) -> int:
        place = checks._canonicalize_group_rank(group, place_or_rank, group_argument)
        checks._check_not_self_rank(group, place, what)
        return members(group)[place]

    def outside(group: Any, call: str) -> bool:
        if checks._rank_not_in_group(group):
            checks._warn_not_in_group(call)
            return True
        return False

    def object_from(place: int, call: str, group: Any, own: Any) -> Any:
        """What the rank at ``place`` says to the group in this call; where it cannot be had, what this rank
        has."""
        sender = members(group)[place]
        if sender == world.rank:
            return own
        available, content = mailbox.read(sender, topic(call, group))
        return content if available else assumed(call, [sender], own)

    def everybody(call: str, group: Any, own: Any) -> list[Any]:
        number = mailbox.post(topic(call, group), own)
        contents, silent = mailbox.hear(members(group), topic(call, group), number, own)
        return assumed(call, silent, contents) if silent else contents

    def assumed(call: str, ranks: list[int], value: Any) -> Any:
        world.note(
            f"{call}: ranks that have not run are taken to say what the one that asks says itself",
            NoteKind.APPROXIMATION,
            f"rank {world.rank} of {ranks_words(ranks)}",
        )
        return value

    def topic(call: str, group: Any) -> str:
        return f"{call} {members(group)}"

    @replaces(c10d, everywhere=True)
    def all_gather_object(_: Any, object_list: list[Any], obj: Any, group: Any = None) -> None:
        if outside(group, "all_gather_object"):
            return
        group = checks._group_or_default_group(group)
        for index, content in enumerate(everybody("all_gather_object", group, obj)):
            object_list[index] = content

    @replaces(c10d, everywhere=True)
    def gather_object(
        _: Any,
        obj: Any,
        object_gather_list: Any = None,
        dst: Any = None,
        group: Any = None,
        group_dst: Any = None,
    ) -> None:
        group = checks._group_or_default_group(group)
        receiver = root(group, dst, group_dst)
        if outside(group, "gather_object"):
            return
        checks._validate_output_list_for_rank(group.rank(), receiver, object_gather_list)
        if receiver != group.rank():
            mailbox.post(topic("gather_object", group), obj)
            return
        for index, content in enumerate(everybody("gather_object", group, obj)):
            object_gather_list[index] = content

    @replaces(c10d, everywhere=True)
    def broadcast_object_list(
        _: Any,
        object_list: list[Any],
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
    ) -> None:
        group = checks._group_or_default_group(group)
        sender = root(group, src, group_src)
        if outside(group, "broadcast_object_list"):
            return
        if sender == group.rank():
            mailbox.post(topic("broadcast_object_list", group), list(object_list))
            return
        objects = object_from(sender, "broadcast_object_list", group, list(object_list))
        for index, content in zip(range(len(object_list)), objects, strict=False):
            object_list[index] = content

    @replaces(c10d, everywhere=True)
    def scatter_object_list(
        _: Any, scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, src: Any = None,
        group: Any = None, group_src: Any = None,
    ) -> None:  # fmt: skip
        output, inputs = scatter_object_output_list, scatter_object_input_list
        group = checks._group_or_default_group(group)
        sender = root(group, src, group_src)
        if outside(group, "scatter_object_list"):
            return
        if not isinstance(output, list) or len(output) < 1:
            raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
        if sender == group.rank():
            if inputs is None:
                raise ValueError("source rank must provide non-None scatter_object_input_list")
            mailbox.post(topic("scatter_object_list", group), list(inputs))
        everything = object_from(sender, "scatter_object_list", group, inputs)
        output[0] = everything[group.rank()] if everything else None

    @replaces(c10d, everywhere=True)
    def send_object_list(
        _: Any, object_list: list[Any], dst: Any = None, group: Any = None, device: Any = None,
        group_dst: Any = None, use_batch: bool = False,
    ) -> None:  # fmt: skip
        group = checks._group_or_default_group(group)
        receiver = peer(group, dst, group_dst, "destination")
        if outside(group, "send_object_list"):
            return
        mailbox.post(f"send_object_list {world.rank} {receiver} {members(group)}", list(object_list))

    @replaces(c10d, everywhere=True)
    def recv_object_list(
        _: Any, object_list: list[Any], src: Any = None, group: Any = None, device: Any = None,
        group_src: Any = None, use_batch: bool = False,
    ) -> int:  # fmt: skip
        group = checks._group_or_default_group(group)
        if src is None and group_src is None:
            raise NotImplementedError(
                "windtunnel: recv_object_list from any rank cannot be emulated because which rank sends"
                " first is a matter of time; name the rank"
            )
        sender = peer(group, src, group_src, "source")
        if outside(group, "recv_object_list"):
            return -1
        available, content = mailbox.read(sender, f"send_object_list {sender} {world.rank} {members(group)}")
        if not available:
            raise NotImplementedError(
                f"windtunnel: recv_object_list from rank {sender} cannot be emulated because that rank sends"
                f" nothing to rank {world.rank} before its capture ends, or too many ranks would have to run"
            )
        for index, item in zip(range(len(object_list)), content, strict=False):
            object_list[index] = item
        return sender


KINDS = ("broadcast", "scatter", "send", "all_gather", "gather")  # as in collectives.cpp
BROADCAST, SCATTER, SEND, ALL_GATHER, GATHER = range(5)

Place = ctypes.c_int64  # in the group
Data = ctypes.c_void_p
Say = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Place, Data, ctypes.c_int64)
Promise = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, Place, Data, ctypes.c_int64)
Keep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, Data, ctypes.c_int64)


_callbacks: list[Any] = []  # the native library holds no reference


def install_values(world: WorldView, native: ctypes.CDLL) -> None:
    """Be called by the native library. Call once."""
    values = Values(world)
    calls = ((Say, values.say), (Promise, values.promise), (Keep, values.keep))
    _callbacks[:] = [kind(values.guarded(call)) for kind, call in calls]
    native.wt_values(*_callbacks)


@dataclass
class Values:
    """What is promised to this rank. ``promises[n - 1]`` finds the bytes of promise n, or None."""

    world: WorldView
    promises: list[Callable[[], bytes | None]] = field(default_factory=list)
    contents: dict[int, bytes | None] = field(default_factory=dict)

    def guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            try:
                return call(*args)
            except BaseException as error:  # an exception does not pass through C++
                failure.fail(error, self.world.mailbox.files)
                os._exit(1)

        return guarded

    def say(self, kind: int, name: bytes, to: int, data: int | None, size: int) -> None:
        """This rank says ``size`` bytes at ``data``, or that nobody knows them (None), to the place ``to`` of
        the group, or to all of it (-1)."""
        _, topic = self._topic(kind, name, to)
        self.world.mailbox.announced += data is not None
        self.world.mailbox.post(topic, ctypes.string_at(data, size) if data else None)

    def promise(self, kind: int, name: bytes, place: int, own: int | None, size: int) -> int:
        """What the rank at ``place`` of the group says is promised; of a gather what all say (-1), where this
        rank says ``size`` bytes at ``own``. Returns the promise's number, from 1."""
        mailbox, rank = self.world.mailbox, self.world.rank
        ranks, topic = self._topic(kind, name, -1)
        if kind in (ALL_GATHER, GATHER):
            senders = ranks if place < 0 else [ranks[place]]
            return self._add(self._gathered(kind, ranks, senders, topic, own, size))
        if kind in (SCATTER, SEND):
            topic = self._topic(kind, name, ranks.index(rank))[1]
        sender = ranks[place]
        number = mailbox.number(f"read {sender} {topic}")
        return self._add(lambda: mailbox.wait(sender, topic, number)[1])

    def _add(self, find: Callable[[], bytes | None]) -> int:
        self.promises.append(find)
        return len(self.promises)

    def _gathered(
        self, kind: int, ranks: list[int], senders: list[int], topic: str, own: int | None, size: int
    ) -> Callable[[], bytes | None]:
        mailbox, rank = self.world.mailbox, self.world.rank
        later = [
            other_rank for other_rank in ranks if other_rank != rank and other_rank not in mailbox.earlier
        ]
        number = mailbox.counts[f"post {topic}"] - 1  # all say something in this call, as this rank just did
        mine = ctypes.string_at(own, size) if own else None

        def find() -> bytes | None:
            parts, silent = mailbox.hear(senders, topic, number, mine)
            if silent and mine is not None:  # one sentence, whichever of them is asked for
                self.world.note(
                    f"{KINDS[kind]}: ranks that have not run are taken to hold the values that the one that "
                    "asks holds itself",
                    NoteKind.APPROXIMATION,
                    f"rank {rank} of {ranks_words(later or silent)}",
                )
            return None if None in parts else b"".join(part or b"" for part in parts)

        return find

    def keep(self, promise: int, into: int, size: int) -> int:
        """Write what was promised to ``into``; 0 where nobody knows it."""
        if promise not in self.contents:
            self.contents[promise] = self.promises[promise - 1]()
        content = self.contents[promise]
        if content is None or len(content) != size:
            return 0
        ctypes.memmove(into, content, size)
        return 1

    def _topic(self, kind: int, name: bytes, to: int) -> tuple[list[int], str]:
        """The group's ranks, and what a message is called."""
        group = self.world.groups[self.world.names[name.decode()]]
        place = self.world.mailbox.place
        return list(group.ranks), f"{KINDS[kind]} {place}{group.label} {group.ranks} {to}"


def install_untouched(native: ctypes.CDLL) -> None:
    """Let large fills wait from now on: host tensors that nobody has looked at take no memory
    (`native/untouched.cpp`). Call once, in the process of a rank.

    The native library sees operators and touched memory. Two things are neither: ``trunc_normal_`` is five
    operators that each read what the one before wrote, and the kernel of the operating system, which reads
    and writes an array of NumPy for whoever gives it to a file, touches nothing. A worker of a data loader
    takes touched memory for its end, so there the library's way to handle it is put back."""
    native.wt_untouched()
    handles = ctypes.create_string_buffer(256)  # more than a struct sigaction
    native.sigaction(signal.SIGSEGV, None, handles)

    @replaces(torch.utils.data._utils.signal_handling)
    def _set_worker_signal_handlers(original: Any) -> None:
        original()
        native.sigaction(signal.SIGSEGV, handles, None)

    @replaces(torch.nn.init)
    def _no_grad_trunc_normal_(
        filled: Any, tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if generator is None and tensor.device.type == "cpu":
            with torch.no_grad():
                if torch.ops.windtunnel.truncated_normal_(tensor, mean, std, a, b):
                    return tensor
        return filled(tensor, mean, std, a, b, generator=generator)

    @replaces(torch.Tensor)
    def numpy(original: Any, self: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        begin, end = np.lib.array_utils.byte_bounds(result)
        native.wt_touch(begin, end - begin)
        return result
