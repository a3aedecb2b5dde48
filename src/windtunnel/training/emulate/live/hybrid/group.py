"""The process group of a live rank: collectives whose other members are virtual, or live as well.

What a virtual rank holds is one stated rule. ``uniform``: what the first live rank of the group holds, which
is this rank where no other is live. So a SUM is this rank's data times the size of the group, reduce_scatter
that of its own chunk, all_gather gives copies, and all_to_all keeps its splits. ``zeros``: zeros. A message
from a virtual rank holds zeros under both rules, and a broadcast or scatter from one leaves the buffer as it
is under ``uniform``. Between live ranks the true data go, over gloo; a group of live ranks only is a gloo
group.

A call has its data when it returns. When it ends on the virtual clock is the coordinator's matter, which is
told where the program calls and where it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo  # not c10d's name: that is this module's group now
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from windtunnel.training.emulate.live.hybrid.link import Link

RULES = ("uniform", "zeros")
PATIENCE = timedelta(days=1)
"""Of gloo between live ranks: a debugger may hold one of them. The coordinator sees that a rank ends."""


@dataclass
class LiveWorld:
    """What all groups of this process share."""

    rank: int
    live: frozenset[int]
    rule: str
    link: Link
    directory: Path
    meetings: dict[tuple[int, ...], int] = field(default_factory=dict)  # groups of these ranks so far


class Work(dist._Work):
    """A call that was made."""

    def __init__(self, link: Link, number: int, result: list[Tensor], pending: Sequence[Any] = ()) -> None:
        super().__init__()
        self._link, self._number, self._tensors, self._pending = link, number, result, pending

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._link.clock:
            for work in self._pending:
                work.wait()
            self._pending = ()
            self._link.wait(self._number)
        return True

    def is_completed(self) -> bool:
        return not self._pending

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        with self._link.clock:
            for work in self._pending:
                work.wait()
            self._link.wait_later(self._number)
            future: Future[Any] = Future()
            future.set_result(self._tensors)
        return future

    def result(self) -> list[Tensor]:
        return self._tensors


class Group(dist.ProcessGroup):
    """See the module."""

    def __init__(self, world: LiveWorld, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._world, self._place, self._count = world, rank, size
        self._ranks: tuple[int, ...] = ()
        self.options = SimpleNamespace()  # c10d writes into them
        self._real: Any = None  # gloo between the live members, if there are several

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return "windtunnel"

    @property
    def pg_name(self) -> str:
        return c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> None:
        return None

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _members(self) -> tuple[int, ...]:
        if not self._ranks:
            self._ranks = tuple(dist.get_process_group_ranks(self))
            here = sorted(self._world.live.intersection(self._ranks))
            self._places = [self._ranks.index(rank) for rank in here]  # of the live members
            if len(here) > 1:
                number = self._world.meetings.get(self._ranks, 0)
                self._world.meetings[self._ranks] = number + 1
                name = f"gloo-{hash(self._ranks) & 0xFFFFFFFF:x}-{number}"
                store = dist.FileStore(str(self._world.directory / name), len(here))
                own = self._places.index(self._place)
                self._real = ProcessGroupGloo(store, own, len(here), PATIENCE)
        return self._ranks

    def _call(
        self, kind: str, name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor],
        data: Callable[[], None], root: int = -1,
    ) -> Work:  # fmt: skip
        """Note the call and supply its data. ``name`` and ``args``: what a group of live ranks does."""
        link = self._world.link
        with link.clock, torch.no_grad():
            ranks = self._members()
            nbytes = max(sum(map(_bytes, ins)), sum(map(_bytes, outs)))
            number = link.called(kind, ranks, nbytes, ranks[root] if root >= 0 else -1)
            if self._real is None:
                data()
            else:
                link.flush()
                with _disable_current_modes():  # what the data take meanwhile is no memory of the program's
                    if len(self._places) == self._count:
                        getattr(self._real, name)(*args).wait()
                    else:
                        data()
            return Work(link, number, list(outs))

    def _held(self, tensors: Sequence[Tensor]) -> Callable[[int, int], Tensor | None]:
        """What the rank at a place holds as its n-th input, None for zeros."""
        own = self._place
        live: dict[int, Sequence[Tensor]] = {own: tensors}
        if len(self._places) > 1:
            for n, tensor in enumerate(tensors):
                parts = [torch.empty_like(tensor) for _ in self._places]
                self._real.allgather([parts], [tensor.contiguous()]).wait()
                for place, part in zip(self._places, parts, strict=True):
                    if place != own:
                        live.setdefault(place, [])
                        live[place] = [*live[place][:n], part]
        virtual = live[self._places[0]] if self._world.rule == "uniform" else None

        def held(place: int, n: int) -> Tensor | None:
            given = live.get(place, virtual)
            return None if given is None else given[n]

        return held

    def _reduce(self, tensors: Sequence[Tensor], op: Any) -> None:
        """Reduce each tensor over all places, in place."""
        held = self._held(tensors)
        for n, tensor in enumerate(tensors):
            others = [held(place, n) for place in self._places if place != self._place]
            virtual = self._count - len(self._places)
            if self._world.rule == "uniform" and self._place != self._places[0]:
                # the virtual ranks hold the first one's data: start from these, and add the own ones
                first = held(self._places[0], n)
                assert first is not None
                own = tensor.clone()
                tensor.copy_(first)
                others = [own if one is first else one for one in others]
            _apply(tensor, [one for one in others if one is not None], virtual, self._world.rule, op)

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = opts or dist.AllreduceOptions()
        return self._call(
            "all_reduce", "allreduce", (tensors, opts), tensors, tensors,
            lambda: self._reduce(tensors, opts.reduceOp),
        )  # fmt: skip

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Work:
        root = int(opts.rootRank)

        def data() -> None:
            kept = tensors if root == self._place else [one.clone() for one in tensors]
            self._reduce(kept, opts.reduceOp)

        return self._call("reduce", "reduce", (tensors, opts), tensors, tensors, data, root)

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        root = int(opts.rootRank)

        def data() -> None:
            held = self._held(tensors)
            if root != self._place:
                for n, tensor in enumerate(tensors):
                    _fill(tensor, held(root, n))

        return self._call("broadcast", "broadcast", (tensors, opts), tensors, tensors, data, root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        def data() -> None:
            held = self._held(inputs)
            for n, parts in enumerate(outputs):
                for place, part in enumerate(parts):
                    _fill(part, held(place, n))

        flat = [part for parts in outputs for part in parts]
        args = (outputs, inputs, opts or dist.AllgatherOptions())
        return self._call("all_gather", "allgather", args, inputs, flat, data)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self.allgather([_chunks(output, self._count)], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self.allgather([_chunks(one, self._count) for one in outputs], inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        root = int(opts.rootRank)

        def data() -> None:
            held = self._held(inputs)
            for n, parts in enumerate(outputs):
                for place, part in enumerate(parts):
                    _fill(part, held(place, n))

        flat = [part for parts in outputs for part in parts]
        return self._call("gather", "gather", (outputs, inputs, opts), inputs, flat, data, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        root = int(opts.rootRank)

        def data() -> None:
            whole = inputs if inputs else [[one] * self._count for one in outputs]
            held = self._held([torch.stack(list(parts)) for parts in whole])
            for n, output in enumerate(outputs):
                given = held(root, n)
                _fill(output, None if given is None else given[self._place])

        flat = [part for parts in inputs for part in parts]
        return self._call("scatter", "scatter", (outputs, inputs, opts), flat, outputs, data, root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()

        def data() -> None:
            if len(self._places) == 1:
                for output, parts in zip(outputs, inputs, strict=True):
                    _fill(output, parts[self._place])
                    _apply(output, [], self._count - 1, self._world.rule, opts.reduceOp)
                return
            for output, parts in zip(outputs, inputs, strict=True):
                whole = torch.stack([part.reshape(-1) for part in parts])
                self._reduce([whole], opts.reduceOp)
                output.copy_(whole[self._place].view_as(output))

        flat = [part for parts in inputs for part in parts]
        return self._call("reduce_scatter", "reduce_scatter", (outputs, inputs, opts), flat, outputs, data)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self.reduce_scatter([output], [_chunks(input, self._count)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self.reduce_scatter(outputs, [_chunks(one, self._count) for one in inputs], opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        def data() -> None:
            if len(self._places) > 1:
                raise NotImplementedError(
                    "windtunnel: all_to_all in a group of live and virtual ranks needs one live rank in it,"
                    f" or all {self._count}; here are {len(self._places)}"
                )
            own = inputs[self._place]
            for place, output in enumerate(outputs):
                if place == self._place:
                    output.copy_(own)
                elif self._world.rule == "uniform" and output.shape == own.shape:
                    output.copy_(own)  # what the same rank would send here
                elif self._world.rule == "uniform" and output.shape == inputs[place].shape:
                    output.copy_(inputs[place])
                else:
                    output.zero_()

        args = (outputs, inputs, opts or dist.AllToAllOptions())
        return self._call("all_to_all", "alltoall", args, inputs, outputs, data)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        return self.alltoall(
            _split(output, output_splits, self._count), _split(input, input_splits, self._count), opts
        )

    def barrier(self, opts: Any = None) -> Work:
        def data() -> None:
            if len(self._places) > 1:
                self._real.barrier().wait()

        return self._call("barrier", "barrier", (opts or dist.BarrierOptions(),), (), (), data)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._message("recv", tensors, src, tag)

    def _message(self, kind: str, tensors: Any, peer: int, tag: int) -> Work:
        link = self._world.link
        with link.clock, torch.no_grad():
            ranks = self._members()
            number = link.called(kind, ranks, sum(map(_bytes, tensors)), ranks[peer])
            pending = []
            if peer in self._places:
                link.flush()
                pending.append(getattr(self._real, kind)(tensors, self._places.index(peer), tag))
            elif kind == "recv":
                for tensor in tensors:
                    tensor.zero_()
            return Work(link, number, list(tensors), pending)

    # as PyTorch 2.11 and 2.12 call them
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _apply(tensor: Tensor, others: Sequence[Tensor], virtual: int, rule: str, op: Any) -> None:
    """Reduce ``tensor`` with ``others`` and with so many virtual ranks, which hold the same as ``tensor``, or
    zeros."""
    kind = getattr(op, "op", op)
    kinds = dist.ReduceOp
    copies = 1 + (virtual if rule == "uniform" else 0)
    zeros = virtual if rule == "zeros" else 0
    if kind in (kinds.SUM, kinds.AVG, kinds.PREMUL_SUM):
        if copies > 1:
            tensor.mul_(copies)
        for one in others:
            tensor.add_(one)
        if kind == kinds.AVG:
            tensor.div_(1 + len(others) + virtual)
        elif kind == kinds.PREMUL_SUM:
            tensor.mul_(op.__getstate__()[1])
    elif kind in (kinds.MAX, kinds.MIN):
        pick = torch.maximum if kind == kinds.MAX else torch.minimum
        for one in (*others, *([torch.zeros_like(tensor)] if zeros else [])):
            pick(tensor, one, out=tensor)
    elif kind == kinds.PRODUCT:
        tensor.pow_(copies)
        for one in (*others, *([torch.zeros_like(tensor)] if zeros else [])):
            tensor.mul_(one)
    else:  # of bits: more of the same changes nothing but for BXOR
        step = {kinds.BAND: "bitwise_and_", kinds.BOR: "bitwise_or_", kinds.BXOR: "bitwise_xor_"}[kind]
        if kind == kinds.BXOR and copies % 2 == 0:
            tensor.zero_()
        for one in (*others, *([torch.zeros_like(tensor)] if zeros else [])):
            getattr(tensor, step)(one)


def _fill(tensor: Tensor, content: Tensor | None) -> None:
    if content is None:
        tensor.zero_()
    elif content is not tensor:
        tensor.copy_(content.view_as(tensor) if content.numel() == tensor.numel() else content)


def _chunks(tensor: Tensor, count: int) -> list[Tensor]:
    return list(tensor.view(-1).chunk(count)) if tensor.numel() else [tensor.view(-1)] * count


def _split(tensor: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    return list(tensor.split(list(sizes) or tensor.shape[0] // count))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
