"""The process group of a live rank: collectives whose other members are virtual, or live as well.

What a virtual rank holds is one stated rule. ``uniform``: what the first live rank of the group holds, which
is this rank where no other is live. So a SUM is this rank's data times the size of the group, reduce_scatter
that of its own chunk, all_gather gives copies, and all_to_all keeps its splits. ``zeros``: zeros. A message
from a virtual rank holds zeros under both rules. Between live ranks the true data go, over gloo; a group of
live ranks only is a gloo group.

A call has its data when it returns. When it ends on the virtual clock is the coordinator's matter, which is
told where the program calls and where it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C import _distributed_c10d as below  # where the names are PyTorch's own: c10d's are replaced
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from windtunnel.training.emulate.live.hybrid.link import CoordinatorLink

PATIENCE = timedelta(days=1)
"""Of gloo between live ranks: a debugger may hold one of them. The coordinator sees that a rank ends."""
Base: Any = dist.ProcessGroup
Tensors = Sequence[Tensor]
Op: Any = dist.ReduceOp
SUM, AVG, PREMUL_SUM = map(int, (Op.SUM, Op.AVG, Op.PREMUL_SUM))  # which compare ten times as fast


@dataclass
class LiveWorld:
    """What all groups of this process share. ``groups``: how many of the same ranks there are so far."""

    live: frozenset[int]
    rule: str
    link: CoordinatorLink
    directory: Path
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)


class GroupWork(below.Work):
    """A call that was made. ``pending``: messages between live ranks that are on their way."""

    def __init__(
        self, link: CoordinatorLink, number: int, result: list[Tensor], pending: Sequence[Any] = ()
    ) -> None:
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

    def get_future(self) -> Future[Any]:
        with self._link.clock:
            self._link.wait_later(self._number)
            future: Future[Any] = Future()
            future.set_result(self._tensors)
            return future

    def result(self) -> list[Tensor]:
        return self._tensors


class HybridGroup(Base):  # type: ignore[misc]
    """See the module. Methods are those of c10d's groups, by all names that it calls them."""

    def __init__(self, world: LiveWorld, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._world, self._place, self._count = world, rank, size
        self.options = SimpleNamespace()  # c10d writes into them
        self._ranks: tuple[int, ...] = ()
        self._real: Any = None  # gloo between the live members, if there are several

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return "windtunnel"

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names[self]

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def allreduce(self, tensors: Any, opts: Any, name: str = "allreduce") -> GroupWork:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._call(
            "all_reduce", name, (tensors, opts), tensors, tensors,
            lambda: self._reduce(tensors, opts.reduceOp),
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> GroupWork:
        return self.allreduce(tensors, opts, "allreduce_coalesced")

    def reduce(self, tensors: Any, opts: Any) -> GroupWork:
        root = int(opts.rootRank)
        return self._call(
            "reduce", "reduce", (tensors, opts), tensors, tensors,
            lambda: self._reduce(
                tensors if root == self._place else [tensor.clone() for tensor in tensors], opts.reduceOp
            ), root,
        )  # fmt: skip

    def broadcast(self, tensors: Any, opts: Any) -> GroupWork:
        root = int(opts.rootRank)

        def data() -> None:
            input_at = self._inputs(tensors)
            for n, tensor in enumerate(tensors):
                _fill(tensor, input_at(root, n))

        return self._call("broadcast", "broadcast", (tensors, opts), tensors, tensors, data, root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        return self._gathered("all_gather", outputs, inputs, opts or below.AllgatherOptions())

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> GroupWork:
        return self.allgather([self._chunks(output)], [input.view(-1)], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        return self.allgather(
            [self._chunks(output) for output in outputs], [tensor.view(-1) for tensor in inputs], opts
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> GroupWork:
        return self._gathered("gather", outputs, inputs, opts, int(opts.rootRank))

    def _gathered(self, kind: str, outputs: Any, inputs: Any, opts: Any, root: int = -1) -> GroupWork:
        def data() -> None:
            input_at = self._inputs(inputs)
            for n, parts in enumerate(outputs):
                for place, part in enumerate(parts):
                    _fill(part, input_at(place, n))

        flat = [part for parts in outputs for part in parts]
        return self._call(kind, kind.replace("_", ""), (outputs, inputs, opts), inputs, flat, data, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> GroupWork:
        root = int(opts.rootRank)

        def data() -> None:
            whole = inputs or [[output] * self._count for output in outputs]
            input_at = self._inputs([torch.stack(list(parts)) for parts in whole])
            for n, output in enumerate(outputs):
                parts_of_root = input_at(root, n)
                _fill(output, None if parts_of_root is None else parts_of_root[self._place])

        flat = [part for parts in inputs for part in parts]
        return self._call("scatter", "scatter", (outputs, inputs, opts), flat, outputs, data, root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> GroupWork:
        def data() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                if self._real is None:
                    _fill(output, parts[self._place])
                    self._reduce([output], opts.reduceOp)
                else:
                    whole = torch.stack([part.reshape(-1) for part in parts])
                    self._reduce([whole], opts.reduceOp)
                    _fill(output, whole[self._place])

        flat = [part for parts in inputs for part in parts]
        return self._call("reduce_scatter", "reduce_scatter", (outputs, inputs, opts), flat, outputs, data)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> GroupWork:
        self._members()
        if self._real is not None or not output.numel():
            return self.reduce_scatter([output.view(-1)], [self._chunks(input)], opts)

        def data() -> None:
            own, flat = input.view(self._count, -1)[self._place], output.view(-1)
            if self._world.rule == "uniform" and int(opts.reduceOp.op) == SUM:
                torch.mul(own, self._count, out=flat)
            else:
                flat.copy_(own)
                _combine(flat, (), self._count - 1, self._world.rule, opts.reduceOp)

        return self._call("reduce_scatter", "", (), [input], [output], data)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> GroupWork:
        return self.reduce_scatter(
            [output.view(-1) for output in outputs], [self._chunks(tensor) for tensor in inputs], opts
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        def data() -> None:
            if self._real is not None:
                raise NotImplementedError(
                    "windtunnel: all_to_all needs one live rank in its group, or all of them live"
                )
            own, uniform = inputs[self._place], self._world.rule == "uniform"
            for place, output in enumerate(outputs):
                # what a rank like this one sends here, which fits where all splits are alike
                same = uniform or place == self._place
                _fill(output, own if same and output.shape == own.shape else None)

        args = (outputs, inputs, opts or below.AllToAllOptions())
        return self._call("all_to_all", "alltoall", args, inputs, outputs, data)

    def all_to_all_single(
        self, output: Any, input: Any, out_sizes: Any, in_sizes: Any, opts: Any
    ) -> GroupWork:
        def split(tensor: Tensor, sizes: Any) -> list[Tensor]:
            return list(tensor.split(list(sizes) or tensor.shape[0] // self._count))

        return self.alltoall(split(output, out_sizes), split(input, in_sizes), opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._call(
            "barrier", "barrier", (opts or below.BarrierOptions(),), (), (),
            lambda: self._real.barrier().wait() if self._real else None,
        )  # fmt: skip

    def send(self, tensors: Any, dst: int, tag: int = 0) -> GroupWork:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> GroupWork:
        return self._message("recv", tensors, src, tag)

    # as PyTorch 2.11 and 2.12 call them
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _message(self, kind: str, tensors: Tensors, peer: int, tag: int) -> GroupWork:
        link, pending = self._world.link, []
        with link.clock, torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            ranks = self._members()
            number = link.called(kind, ranks, sum(tensor.nbytes for tensor in tensors), ranks[peer])
            if peer in self._places:
                link.flush()
                pending.append(getattr(self._real, kind)(tensors, self._places.index(peer), tag))
            elif kind == "recv":
                for tensor in tensors:
                    tensor.zero_()
            return GroupWork(link, number, list(tensors), pending)

    def _call(
        self, kind: str, name: str, args: Sequence[Any], ins: Tensors, outs: Tensors,
        data: Callable[[], None], root: int = -1,
    ) -> GroupWork:  # fmt: skip
        """Note the call and supply its data. ``name`` and ``args``: what a group of live ranks does."""
        link = self._world.link
        with link.clock, torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            ranks = self._members()
            nbytes = max(sum(tensor.nbytes for tensor in ins), sum(out.nbytes for out in outs))
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
            return GroupWork(link, number, list(outs))

    def _members(self) -> tuple[int, ...]:
        if not self._ranks:
            world = self._world
            ranks = self._ranks = tuple(dist.get_process_group_ranks(self))
            self._places = [place for place, rank in enumerate(ranks) if rank in world.live]
            if len(self._places) > 1:
                number = world.groups[ranks] = world.groups.get(ranks, 0) + 1
                store = below.FileStore(
                    str(world.directory / f"gloo-{hash(ranks):x}-{number}"), len(self._places)
                )
                own = self._places.index(self._place)
                self._real = below.ProcessGroupGloo(store, own, len(self._places), PATIENCE)
        return self._ranks

    def _inputs(self, tensors: Tensors) -> Callable[[int, int], Tensor | None]:
        """What the rank at a place holds as its n-th input; None for zeros."""
        live: dict[int, list[Tensor]] = {self._place: list(tensors)}
        if self._real is not None:
            live |= {place: [] for place in self._places if place != self._place}
            for tensor in tensors:
                parts = [torch.empty_like(tensor) for _ in self._places]
                self._real.allgather([parts], [tensor.contiguous()]).wait()
                for place, part in zip(self._places, parts, strict=True):
                    if place != self._place:
                        live[place].append(part)
        virtual = live[self._places[0]] if self._world.rule == "uniform" else None

        def input_at(place: int, n: int) -> Tensor | None:
            place_inputs = live.get(place, virtual)
            return None if place_inputs is None else place_inputs[n]

        return input_at

    def _reduce(self, tensors: Tensors, op: Any) -> None:
        """Reduce each tensor over all places, in place. With several live ranks all come to the same bits."""
        virtual = self._count - len(self._places)
        if self._real is None:
            for tensor in tensors:
                _combine(tensor, (), virtual, self._world.rule, op)
            return
        input_at = self._inputs(tensors)
        for n, tensor in enumerate(tensors):
            parts = [part for place in self._places if (part := input_at(place, n)) is not None]
            # in the order of the places, the first with what the virtual ranks hold
            parts = [part.clone() for part in parts]
            tensor.copy_(parts[0])
            _combine(tensor, parts[1:], virtual, self._world.rule, op)

    def _chunks(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.view(-1)
        return list(flat.chunk(self._count)) if flat.numel() else [flat] * self._count


def _combine(tensor: Tensor, others: Tensors, virtual: int, rule: str, op: Any) -> None:
    """Reduce ``tensor`` with ``others`` and with so many virtual ranks, which hold the same as ``tensor``, or
    zeros."""
    kind = int(getattr(op, "op", op))
    copies, count = 1 + (virtual if rule == "uniform" else 0), 1 + len(others) + virtual
    if kind == AVG and copies == count:
        return  # of equal parts
    if kind in (SUM, AVG, PREMUL_SUM):
        if copies > 1:
            tensor.mul_(copies)
        for other in others:
            tensor.add_(other)
        if kind == AVG:
            tensor.div_(count)
        elif kind == PREMUL_SUM:
            tensor.mul_(op.__getstate__()[1])
        return
    names = {
        Op.MAX: "maximum", Op.MIN: "minimum", Op.PRODUCT: "mul", Op.BAND: "bitwise_and", Op.BOR: "bitwise_or",
        Op.BXOR: "bitwise_xor",
    }  # fmt: skip
    name = {int(other): name for other, name in names.items()}[kind]
    alike = [tensor.clone()] * (copies - 1) if name in ("mul", "bitwise_xor") else []
    zeros = [torch.zeros_like(tensor)] if virtual and rule == "zeros" else []
    for other in (*others, *alike, *zeros):
        getattr(torch, name)(tensor, other, out=tensor)


def _fill(tensor: Tensor, content: Tensor | None) -> None:
    if content is None:
        tensor.zero_()
    elif content.data_ptr() != tensor.data_ptr():  # else it lies there already
        tensor.copy_(content.view_as(tensor))
