"""What only Python knows: modules, optimisers, steps, call sites, and what a block of memory holds.

Nothing of the script is changed. PyTorch's global hooks say which module runs and when an optimiser has
stepped (what a step of the job is: `steps`). Steps with the same events are of one kind.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from windtunnel.training.emulate.graph import (
    EVENT,
    Category,
    Collective,
    EventKind,
    Group,
    Note,
    NoteKind,
    Operator,
    Phase,
    Slice,
    TensorMeta,
)
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.collector import Collector
from windtunnel.training.emulate.live.host import Launches
from windtunnel.training.emulate.live.patches import replaces
from windtunnel.training.emulate.live.progress import WaitingLoops
from windtunnel.training.emulate.live.world import WorldView
from windtunnel.training.emulate.policy.alike import only_reads, streams_in_order
from windtunnel.training.emulate.program import OptimizerCalls, find_period, on_mark

LEFT_OUT = (EventKind.FREE, EventKind.SYNC, EventKind.CALL)
"""Of the kind of a step. Where Python's collector runs differs from step to step, so frees of cycles do."""

UNUSED = "an optimiser is never called in the steps that were run: what it would update is not in the report"
SMALL = 64
"""Bytes that the host may read of the device without making the step another one."""


@dataclass(frozen=True)
class After:
    """Where a call of an optimiser has ended, and what the blocks held then."""

    event: int
    categories: dict[int, int]
    communicated: int


@dataclass
class Observer:
    """Follows one rank's run. ``on_step`` is called at the end of each step, ``on_mark`` where the program
    says for the first time that one ends there, after others had ended. ``settled``, ``marked``: see
    `session.CaptureRequest`."""

    native: ctypes.CDLL
    world: WorldView
    device: str
    loops: WaitingLoops
    settled: tuple[int, int] | None
    marked: bool
    on_step: Callable[[], None] = field(init=False)
    on_mark: Callable[[], None] = field(init=False)
    scopes: list[str] = field(default_factory=lambda: [""])
    call_sites: list[str] = field(default_factory=list)
    notes: dict[Note, None] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # of each step, what it does as a number
    categories: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # block -> the parameter whose data or state it has
    only_kinds: bool = False  # nothing is wanted any more but of which kind steps are
    regions: int = 0
    in_region: bool = False

    def __post_init__(self) -> None:
        self._scope_ids: dict[str, int] = {"": 0}
        self.collector = Collector()
        self.launches = Launches(self.native)
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[int] = []
        self._site_ids: dict[str, int] = {}
        self._stepping = 0  # calls of optimisers that have not ended: a wrapper's and those inside it
        self._calls: OptimizerCalls[After] = OptimizerCalls()
        self._reads: list[bool] = []  # of each row of the operators' table
        self._optimizers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._updated: set[int] = set()  # parameters, and the optimisers that were called
        self._collected = True  # since the last call of an optimiser
        self._marks: list[After] = []  # at the end of each step
        self._keep: list[Any] = []
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def install(self) -> None:
        """Hook modules, optimisers and the native library's questions. Call once."""
        self.collector.install()
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        on_mark.append(self._marked)

        @replaces(torch.optim.Optimizer, "__init__")
        def recorded_init(make: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers[optimizer] = self._place() or ""

        site = ctypes.CFUNCTYPE(ctypes.c_int32)(self._call_site)
        read = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_double)(self._host_read)
        self._keep += [site, read]
        self.native.wt_callbacks(site, read)
        self._mark_reduced_gradients()
        self._mark_resized()

    def note(self, sentence: str, kind: NoteKind = NoteKind.WARNING, of: str = "") -> None:
        """A sentence for the report, once, and what it holds of."""
        self.notes[Note(sentence, kind, of)] = None

    # -- modules

    @property
    def inside(self) -> bool:
        """A module runs."""
        return bool(self._stack)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        path = self._paths.get(module)
        if not self._stack:
            self._collect()
        if path is None:
            if not self._stack:
                self._roots.add(module)
                for name, child in module.named_modules():
                    self._paths[child] = name or type(module).__name__
            path = self._paths.setdefault(module, type(module).__name__)
        scope = self.scope_row(path)
        self._stack.append(scope)
        self.native.wt_scope(scope)
        self.collector.modules_entered()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self.native.wt_scope(self.scope)

    @property
    def scope(self) -> int:
        """Of the module that runs."""
        return self._stack[-1] if self._stack else 0

    def scope_row(self, path: str) -> int:
        """The row of a module's path."""
        row = self._scope_ids.setdefault(path, len(self.scopes))
        self.scopes += [path] if row == len(self.scopes) else []
        return row

    # -- steps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._stepping += 1
        self.loops.anew()
        self._stack.clear()
        self.native.wt_scope(0)
        self._classify_state(optimizer, gradients=True)
        self.native.wt_phase(int(Phase.OPTIMIZER))
        arguments = [self._not_of_the_optimizer(value) for value in args[1:]]
        return (args[0], *arguments), {
            key: self._not_of_the_optimizer(value) for key, value in kwargs.items()
        }

    def _not_of_the_optimizer(self, value: Any) -> Any:
        """A closure as an argument of ``step`` (LBFGS, Lightning): what it does is forward and backward."""
        if not inspect.isroutine(value) and not isinstance(value, functools.partial):
            return value

        @functools.wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            self.native.wt_phase(int(Phase.OTHER))
            try:
                return value(*args, **kwargs)
            finally:
                self._stack.clear()
                self.native.wt_scope(0)
                self.native.wt_phase(int(Phase.OPTIMIZER))

        return closure

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._classify_state(optimizer, gradients=False)
        updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
        self._updated.update(updated, [id(optimizer)])
        self._stepping -= 1
        if self._stepping:
            return  # a wrapper's call goes on
        self.native.wt_phase(int(Phase.OTHER))
        self.native.wt_event(int(EventKind.STEP), 0, len(self.steps), 0)
        self._collected = False
        if self.marked:
            return
        for mark in self._calls.add(frozenset(updated or [id(optimizer)]), self._after()):
            self._step_ended(mark)
        if self._calls.last is None:
            self._collect()

    def _marked(self) -> None:
        if self.steps and not self.marked:
            self.on_mark()
            return
        self.marked = True
        self._collect()
        self._step_ended(self._after())

    def _after(self) -> After:
        return After(
            self.native.wt_event_count(), dict(self.categories),
            int(self.native.wt_collective_block_count()),
        )  # fmt: skip

    def _collect(self) -> None:
        if not self._collected and not self.only_kinds:
            self._collected = True
            self.collector.step_ended()

    def _step_ended(self, mark: After) -> None:
        begin = self.steps[-1][1] if self.steps else 0
        self.steps.append((begin, mark.event))
        self._marks.append(mark)
        self.kinds.append(self._kind(begin, mark.event))
        self.on_step()

    def program_ended(self) -> None:
        """The script has ended by itself: where no step is complete, what it has done so far is one."""
        if not self.steps and self._calls.last is not None:
            self._step_ended(self._calls.last)

    def events(self, begin: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
        """The events so far, from ``begin``, as an array that owns its memory."""
        count = self.native.wt_event_count() - begin
        if count == 0:
            return np.zeros(0, EVENT)
        address = self.native.wt_events() + begin * EVENT.itemsize
        buffer = (ctypes.c_char * (count * EVENT.itemsize)).from_address(address)
        return _in_order_of_blocks(np.frombuffer(buffer, EVENT).copy())

    def rows(self, begin: int, end: int) -> set[tuple[int, int]]:
        """The distinct operators and collectives of a step."""
        events = self.events(begin)[: end - begin]
        events = events[np.isin(events["kind"], (EventKind.OP, EventKind.COLLECTIVE))]
        return set(zip(events["kind"].tolist(), events["ref"].tolist(), strict=True))

    def _kind(self, begin: int, end: int) -> int:
        """A number that steps have in common which do the same. Left out is that the host only reads what the
        device has (a loss to print, now and then)."""
        for row in range(len(self._reads), self.native.wt_row_count(0)):
            operator = read_operator(self.native.wt_row(0, row))
            small = sum(tensor.nbytes for tensor in operator.tensors()) <= SMALL
            self._reads.append(small and only_reads(operator))
        events = self.events(begin)[: end - begin]
        operators = events["kind"] == EventKind.OP
        reads = np.array([*self._reads, False])[np.where(operators, events["ref"], -1)]
        events = events[~reads & ~np.isin(events["kind"], LEFT_OUT)]
        kind = events["kind"]
        same_ref = (kind == EventKind.OP) | (kind == EventKind.COLLECTIVE)
        same_value = kind == EventKind.ALLOC
        columns = np.stack([
            kind.astype(np.int64), events["phase"], streams_in_order(events), events["scope"],
            np.where(same_ref, events["ref"], 0), np.where(same_value, events["value"], 0),
        ])  # fmt: skip
        return hash(columns.tobytes())

    # -- what a block holds

    def _block(self, tensor: Any) -> int:
        local = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(local, torch.Tensor) or local.device.type == "meta":
            return -1
        return int(self.native.wt_storage_block(local.untyped_storage()._cdata))

    def mark(self, tensors: Iterable[Any], category: Category) -> None:
        for tensor in tensors:
            block = self._block(tensor)
            if block >= 0:
                self.categories[block] = int(category)

    def _classify_state(self, optimizer: Any, gradients: bool) -> None:
        if self.only_kinds:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradients:
            for root in self._roots:
                # Of the class: a module may have attributes of these names (Megatron's DDP has buffers).
                self.mark(torch.nn.Module.parameters(root), Category.PARAMETER)
                self.mark(torch.nn.Module.buffers(root), Category.PARAMETER)
            self.mark(parameters, Category.PARAMETER)
            self.mark((p.grad for p in parameters if p.grad is not None), Category.GRADIENT)
        else:
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    self.mark(state.values(), Category.OPTIMIZER)
        self._name_blocks(optimizer)

    def _name_blocks(self, optimizer: Any) -> None:
        """Write down of which parameter each block has the data, the gradient, or the optimizer's state."""
        for root in self._roots:
            for name, parameter in torch.nn.Module.named_parameters(root):
                state = optimizer.state.get(parameter)
                state_tensors = state.values() if isinstance(state, dict) else ()
                for tensor in (parameter, parameter.grad, *state_tensors):
                    block = self._block(tensor)
                    if block >= 0:
                        self.names.setdefault(block, name)

    def _mark_reduced_gradients(self) -> None:
        """FSDP hands its unsharded gradients to one function, which frees them."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        @replaces(module)
        def foreach_reduce(
            original: Any, fsdp_params: Any, unsharded_grads: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.mark(unsharded_grads, Category.GRADIENT)
            return original(fsdp_params, unsharded_grads, *args, **kwargs)

    def _mark_resized(self) -> None:
        @replaces(torch.UntypedStorage)
        def resize_(original: Any, storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if size and storage.device.type != "meta":
                block = int(self.native.wt_storage_block(storage._cdata))
                if block >= 0:
                    self.categories[block] = int(Category.PARAMETER)  # a gathered parameter, in use
            return result

    # -- where in the script

    def _place(self) -> str | None:
        frame = failure.own_frame(sys._getframe())
        if frame is None:
            return None
        return failure.name_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def _call_site(self) -> int:
        place = self._place()
        if place is None:
            where = self.scopes[self._stack[-1]] if self._stack else ""
            place = f"backward of {where}" if where else "backward"
        return self.site_row(place)

    def site_row(self, place: str) -> int:
        """The row of a call site."""
        row = self._site_ids.setdefault(place, len(self.call_sites))
        self.call_sites += [place] if row == len(self.call_sites) else []
        return row

    def _host_read(self, what: bytes, answer: float) -> None:
        kind = what.decode()
        if kind != "routing":
            self.loops.read(failure.own_frame(sys._getframe()), answer)
        if not kind:
            return
        if kind == "routing":
            self.note(BALANCED, NoteKind.APPROXIMATION)
            return
        default_values = {"item": "1 (False for a boolean)", "item of bytes": "0", "equal": "True"}
        value = default_values.get(kind, "zeros")
        self.note(
            f"what the host reads of the device has no value, {value} stands for it",
            NoteKind.APPROXIMATION,
            self._place() or "backward",
        )

    # -- the result

    def slice(self, whole: bool = False) -> Slice:
        """What was recorded up to the end of the first period, as plain data; ``whole``: to the end of the
        script."""
        period = find_period(self.kinds)
        count, length = self.settled or (period.end, period.length)
        ends = self.steps[:count]
        events = self.events() if whole or not ends else self.events()[: ends[-1][1]]
        names: dict[int, int] = {}
        kinds = [names.setdefault(kind, len(names)) for kind in self.kinds[:count][-length:]]
        if not self.settled and not period.repeats and (length > 1 or not whole):
            what = "the last one" if length == 1 else f"the mean of {length}"
            self.note(
                f"{len(self.steps)} steps were run, and no sequence of them came twice: {what} is reported"
                " (--steps runs more)"
            )
        for optimizer, place in self._optimizers.items():
            parameters = (id(p) for group in optimizer.param_groups for p in group["params"])
            if self._updated.isdisjoint([id(optimizer), *parameters]):
                self.note(UNUSED, of=place)
        collectives, groups = self.calls()
        return Slice(
            rank=self.world.rank, world_size=self.world.size, device=self.device,
            operators=self._operators(),
            collectives=collectives,
            groups=groups, world_groups=list(self.world.groups), events=events,
            steps=ends or [(0, len(events))], period=max(1, len(kinds)), kinds=tuple(kinds) or (0,),
            scopes=self.scopes, call_sites=self.call_sites,
            block_category=self._block_categories(events, self._marks[:count]),
            block_name=self.names, settled=period.repeats, flow=self._flow(),
            communicated=np.unique(self.communicated()), notes=list(self.notes),
        )  # fmt: skip

    def _operators(self) -> list[Operator]:
        """The table of operators, by what the script has set at last of products."""
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        rows = (read_operator(self.native.wt_row(0, i)) for i in range(self.native.wt_row_count(0)))
        return [replace(operator, tf32=tf32) for operator in rows]

    def _flow(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return _numbers_at(self.native.wt_flows(), int(self.native.wt_flow_count()))

    def communicated(self, begin: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The blocks that collectives were given, from the call ``begin`` of them on."""
        count = int(self.native.wt_collective_block_count())
        return _numbers_at(self.native.wt_collective_blocks(), count)[begin:]

    def calls(self) -> tuple[list[Collective], list[Group]]:
        """The table of collectives so far, and the groups that it refers to."""
        mine = [(name, self.world.groups[row]) for name, row in self.world.names.items()]
        groups, rows = [group for _, group in mine], {name: index for index, (name, _) in enumerate(mine)}
        texts = [self.native.wt_row(1, i) for i in range(self.native.wt_row_count(1))]
        return [read_collective(text, rows, groups) for text in texts], groups

    def _block_categories(self, events: np.ndarray[Any, np.dtype[Any]], marks: list[After]) -> dict[int, int]:
        """Marked blocks keep their mark; blocks of collectives are communication buffers; what forward
        allocates and backward frees are activations; the rest is temporary."""
        alloc, free = events[events["kind"] == EventKind.ALLOC], events[events["kind"] == EventKind.FREE]
        count = int(alloc["ref"].max()) + 1 if len(alloc) else 0
        freed_in = np.full(count, -1, np.int64)
        in_range = free["ref"] < count
        freed_in[free["ref"][in_range]] = free["phase"][in_range]
        in_backward = np.isin(freed_in, (int(Phase.BACKWARD), int(Phase.RECOMPUTE)))
        allocated_in = np.zeros(count, np.int64)
        allocated_in[alloc["ref"]] = alloc["phase"]
        before = np.isin(allocated_in, (int(Phase.OTHER), int(Phase.FORWARD)))
        recomputed = (allocated_in == int(Phase.RECOMPUTE)) & (freed_in == int(Phase.BACKWARD))
        category = np.full(count, int(Category.TEMPORARY))
        category[(before & in_backward) | recomputed] = int(Category.ACTIVATION)
        mark = marks[-1] if marks else self._after()
        blocks = _numbers_at(self.native.wt_collective_blocks(), mark.communicated)
        category[blocks[blocks < count]] = int(Category.COMMUNICATION)
        for block, marked in mark.categories.items():
            if block < count:
                category[block] = marked
        return {int(block): int(category[block]) for block in alloc["ref"]}


BALANCED = (
    "balanced routing is declared: what topk, sort, argmax and multinomial choose among values that are not "
    "there goes round, each choice as often as any other"
)


def _numbers_at(address: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A copy of the native library's array there."""
    if count == 0:
        return np.zeros(0, np.int64)
    return np.frombuffer(ctypes.string_at(address, 8 * count), np.int64)


def _in_order_of_blocks(events: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Frees that follow each other directly, sorted by block: a set or a cycle lets its tensors go in the
    order of their addresses, which differs from run to run and means nothing."""
    frees = events["kind"] == EventKind.FREE
    run = np.cumsum(~frees)
    rows = np.flatnonzero(frees)
    ordered = rows[np.lexsort((events["ref"][rows], run[rows]))]
    events[rows] = events[ordered]
    return events


def read_operator(text: bytes | str) -> Operator:
    """A row of the operator table."""
    row = json.loads(text)
    return Operator(
        name=row["n"],
        inputs=tuple(_argument(value) for value in row["i"]),
        outputs=tuple(_argument(value) for value in row["o"]),
        region=row["r"],
    )


def _argument(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorMeta(
            tuple(value["s"]), value["t"], tuple(value["d"]), "cpu" if value.get("c") else "cuda"
        )
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    return value


_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Byte": "uint8", "Bool": "bool", "Char": "int8",
}  # fmt: skip


def read_collective(text: bytes, rows: dict[str, int], groups: list[Group]) -> Collective:
    """A row of the collective table; ``rows``: c10d's group name to the index in ``groups``."""
    row = json.loads(text)
    index = rows[row["g"]]
    peer = row["p"]
    return Collective(
        kind=row["k"], group=index, in_bytes=row["i"], out_bytes=row["o"],
        dtype=_DTYPES.get(row["t"], row["t"].lower()),
        peer=groups[index].ranks[peer] if peer >= 0 else -1, backend="gloo" if row["h"] else "nccl",
    )  # fmt: skip
