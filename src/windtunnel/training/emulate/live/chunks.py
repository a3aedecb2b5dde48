"""Micro-batches of a pipeline: the first of them run, the others are written down again.

Nearly all that a rank of a pipeline does are its micro-batches, and they do the same. So of each stage, in
each call of a schedule, the first one is run. So are the second and the third; where these two did the same
(`templates`), the others but the last are not run: their events are written down with numbers of their own,
and tensors without a graph, on the blocks that theirs would have, stand for what they return. What was
learned lies in a file under what the first micro-batch did: later steps, and other ranks, whose first one
does the same take it from there.

All are run where one may do what the one before it did not: the host looks at the device or hears what
other ranks say, numbers that modules keep or random generators of the host change, the user has hooks
there, or parameters are gathered for each micro-batch. Where they turn out to differ, the rank is run once
more, all of it."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch.distributed.pipelining import _backward, schedules, stage
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from windtunnel.base import atomic
from windtunnel.training.emulate.graph import NoteKind, Phase
from windtunnel.training.emulate.live.mailbox import Mailbox
from windtunnel.training.emulate.live.native_library import unrecorded
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.patches import replaces
from windtunnel.training.emulate.live.templates import (
    INPUT,
    ChunkTemplate,
    Events,
    NumberRange,
    RecordedPart,
    TemplateNames,
    host_state,
    keeps_parameters,
    localised,
    own,
    signature,
    template,
    unlike,
    write,
)

FEWEST = 4
"""Micro-batches of a call of which some may be left out."""
ALIKE = (
    "of the micro-batches of a pipeline stage the first few and the last ran; the others are taken to do "
    "what the second one did"
)


@dataclass
class Micro:
    """A micro-batch: its place in the call, the numbers that its parts took, and, where it is not run, the
    tensors that stand for what it returned, by block."""

    position: int
    replayed: bool
    part_numbers: dict[int, NumberRange] = field(default_factory=dict)
    stands: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@dataclass
class Course:
    """A call of a schedule, as one stage sees it. ``firsts``: digests of the parts of its first micro-batch;
    ``kind``: the parts that later ones are like, ``sure`` of which the third had, too; ``last``: the last one
    differs. ``learns``: none of this is known from before."""

    number: int
    plain: bool
    signature: Any = None  # the signature of its inputs
    firsts: dict[RecordedPart, str] = field(default_factory=dict)
    kind: dict[RecordedPart, ChunkTemplate] = field(default_factory=dict)
    sure: set[RecordedPart] = field(default_factory=set)
    last: bool = False
    learns: bool = True
    path: Path | None = None
    events: dict[RecordedPart, Events] = field(default_factory=dict)  # of the kind, in this process
    returned: dict[RecordedPart, Any] = field(default_factory=dict)  # with `_Meta` for tensors


@dataclass
class CapturedStage:
    """A stage of a pipeline on this rank."""

    names: TemplateNames
    forwards: int = 0
    updates: int = -1
    course: Course = field(default_factory=lambda: Course(-1, True))
    micros: dict[int, Micro] = field(default_factory=dict)


@dataclass
class _Meta:
    """A tensor that a part returned, without it; ``spec``: of a DTensor."""

    words: str
    block: int
    bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    spec: Any


@dataclass
class Chunks:
    """Stands between schedules and stages. ``replays``: not all micro-batches are run."""

    observer: Observer
    mailbox: Mailbox
    replays: bool

    def __post_init__(self) -> None:
        self.native = self.observer.native
        self.updates = 0  # calls of optimisers
        self.stages: weakref.WeakKeyDictionary[Any, CapturedStage] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Call once, before the script runs."""
        base, schedule = stage._PipelineStageBase, schedules._PipelineSchedule
        chunks = self

        @replaces(base)
        def forward_one_chunk(
            forward: Any, self: Any, number: int, args: Any, kwargs: Any = None,
            save_forward_output: bool = True,
        ) -> Any:  # fmt: skip
            chunks.begin(self, number, signature((args, kwargs)))
            if not chunks.replayed(self, number):
                call = (self, number, args, kwargs, save_forward_output)
                return chunks.run(RecordedPart.FORWARD, self, number, lambda: forward(*call))
            output = chunks.replay(RecordedPart.FORWARD, self, number)
            self.fwd_cache[number] = (stage._normalize_model_output_as_tuple(output), [])
            if self.is_last and save_forward_output:
                self.output_chunks.append(output)
            return output

        @replaces(schedule)
        def _maybe_compute_loss(
            loss: Any, self: Any, stage: Any, output: Any, targets: Any, number: int, *args: Any
        ) -> None:
            if not stage.is_last or self._loss_fn is None:
                return
            if chunks.replayed(stage, number):
                self._internal_losses.append(chunks.replay(RecordedPart.LOSS, stage, number))
                return
            call = (self, stage, output, targets, number, *args)
            chunks.run(
                RecordedPart.LOSS, stage, number, lambda: loss(*call), lambda: self._internal_losses[-1]
            )

        @replaces(base)
        def backward_one_chunk(
            backward: Any, self: Any, number: int, loss: Any = None, full_backward: bool = True,
            last_backward: bool = False,
        ) -> None:  # fmt: skip
            if not chunks.replayed(self, number):
                call = (self, number, loss, full_backward, last_backward)
                gradients = lambda: self.bwd_cache.get(number)  # noqa: E731
                chunks.run(RecordedPart.BACKWARD, self, number, lambda: backward(*call), gradients)
                return
            self.fwd_cache.pop(number)
            self.bwd_cache[number] = replayed = chunks.replay(RecordedPart.BACKWARD, self, number)
            if full_backward:
                chunks.end(self, number)
                return
            self.dw_runner[number] = self.backward_state[number] = None
            for info, gradient in zip(self.args_recv_info[number], replayed, strict=False):
                if not info.is_root_arg:
                    info.buffer.grad = gradient  # as autograd leaves it there until the step is over

        @replaces(base)
        def backward_weight_one_chunk(
            weights: Any, self: Any, number: int, last_backward: bool = False
        ) -> None:
            if not chunks.replayed(self, number):
                call = (self, number, last_backward)
                chunks.run(RecordedPart.WEIGHTS, self, number, lambda: weights(*call), lambda: None)
                return
            self.backward_state.pop(number)
            chunks.replay(RecordedPart.WEIGHTS, self, number)
            chunks.end(self, number)

        @replaces(_backward)
        def get_param_groups(grouping: Any, inputs: Any, params: Any, *args: Any) -> Any:
            """Of sets, whose order is that of addresses, lists: so steps and micro-batches are alike."""
            groups = grouping(inputs, params, *args)
            for group in groups:
                group["params"] = sorted(group["params"], key=params.index)
                group["intermediates"] = sorted(group["intermediates"], key=lambda node: node._sequence_nr())
            return groups

        def updated(*_: Any) -> None:
            chunks.updates += 1

        register_optimizer_step_post_hook(updated)

    def begin(self, of: Any, number: int, input_signature: Any) -> None:
        """A forward of inputs with this signature comes: decide whether this micro-batch is run."""
        stage = self.stages.setdefault(of, CapturedStage(TemplateNames(self.observer)))
        chunks = of.chunks or 1
        position = stage.forwards % chunks
        stage.forwards += 1
        if position == 0:
            fit = self.replays and of.has_backward and of.dw_builder is None and chunks >= FEWEST
            fit = fit and not self.native.wt_flow_count() and keeps_parameters(of.submod)
            turn = stage.course.number + 1 if self.updates == stage.updates else 0
            stage.course = Course(turn, not fit, input_signature)
            stage.updates = self.updates
            stage.micros.clear()
        course = stage.course
        sure = position > 2 and RecordedPart.FORWARD in course.sure
        replayable = sure if course.learns else position > 0
        ends = position == chunks - 1 and (course.learns or course.last)
        other = input_signature != course.signature
        course.plain |= other and course.learns and position in (1, 2)
        stage.micros[number] = Micro(position, replayable and not (ends or other or course.plain))

    def replayed(self, of: Any, number: int) -> bool:
        """Whether this micro-batch is not run."""
        stage = self.stages.get(of)
        return stage is not None and number in stage.micros and stage.micros[number].replayed

    def run(
        self, part: RecordedPart, of: Any, number: int, call: Callable[[], Any],
        returned: Callable[[], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a part of a micro-batch, and learn from it. ``returned``: what it gives, where ``call`` does
        not."""
        stage, native, observer = self.stages[of], self.native, self.observer
        course, micro = stage.course, stage.micros[number]
        last = micro.position == (of.chunks or 1) - 1
        learns = not course.plain and (
            micro.position == 0 or (course.learns and (micro.position < 3 or last))
        )
        native.wt_forget_site()  # so that its call sites are written down in it, not before
        first, begin = self._next(), native.wt_event_count()
        communicated, marked = native.wt_collective_block_count(), set(observer.categories)
        modules, announced = observer.collector.entered, self.mailbox.announced
        state_before = host_state(of.submod) if learns else None
        self.mailbox.place = f"{part} {of.stage_index} {number} "
        result = call()
        self.mailbox.place = ""
        native.wt_forget_site()
        if not learns:
            return result
        self._take_inputs(of, number, micro)
        micro.part_numbers[part] = NumberRange(
            first, tuple(now - then for now, then in zip(self._next(), first, strict=True))
        )
        leaves, tree = pytree.tree_flatten(returned() if returned else result)
        metas = [self._meta(leaf) for leaf in leaves]
        tensors = [meta for meta in metas if isinstance(meta, _Meta)]
        categories = {b: observer.categories[b] for b in set(observer.categories) - marked}
        did = template(
            part, observer.events(begin), stage.names, micro.part_numbers,
            repr([meta.words if isinstance(meta, _Meta) else meta for meta in metas]),
            [meta.block for meta in tensors], observer.communicated(communicated).tolist(), categories,
            observer.collector.entered - modules,
        )  # fmt: skip
        if micro.position == 0:
            course.returned[part] = (metas, tree)
        if state_before != host_state(of.submod) or announced != self.mailbox.announced:
            self._doubt(stage)
        else:
            self._learn(stage, micro, did, of.chunks, last)
        return result

    def _learn(self, stage: CapturedStage, micro: Micro, did: ChunkTemplate, chunks: int, last: bool) -> None:
        course, part, digest = stage.course, did.part, did.digest()
        if micro.position == 0:
            if part == RecordedPart.FORWARD:
                self._look_up(course, f"{course.number} {chunks} {digest}")
            elif not course.learns and course.firsts.get(part) != digest:
                self._doubt(stage)
            course.firsts[part] = digest
        elif micro.position == 1:
            metas, _ = course.returned[part]
            words = repr([meta.words if isinstance(meta, _Meta) else meta for meta in metas])
            if not did.is_closed or did.returned != words:
                self._doubt(stage)
            course.kind[part] = did
        elif last:
            # Blocks that somebody else may hold.
            blocks = [block for other in course.kind.values() for block in other.blocks]
            like = part in course.kind and course.kind[part].digest(blocks) == did.digest(blocks)
            course.last |= not like
        elif part not in course.kind or course.kind[part].digest() != digest or not did.is_closed:
            self._doubt(stage)
        else:
            course.sure.add(part)
        if last and course.path and not course.plain and course.kind.keys() <= micro.part_numbers.keys():
            content = (course.firsts, course.kind, course.last)
            atomic.replace(course.path, pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))

    def _look_up(self, course: Course, key: str) -> None:
        """What is known of micro-batches after a first one like this."""
        digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        course.path = self.mailbox.files.directory / f"chunks-{digest}"
        if course.path.exists():
            course.firsts, course.kind, course.last = pickle.loads(course.path.read_bytes())
            course.learns = False

    def _doubt(self, stage: CapturedStage) -> None:
        """Micro-batches are not alike: run them all."""
        stage.course.plain = True
        if any(micro.replayed for micro in stage.micros.values()):
            self._again()

    def replay(self, part: RecordedPart, of: Any, number: int) -> Any:
        """Write a part of a micro-batch down that is not run; returns what stands for what it would
        return."""
        stage, native, observer = self.stages[of], self.native, self.observer
        course, micro = stage.course, stage.micros[number]
        if part not in course.kind or part not in course.returned:
            self._again()
        observer.note(ALIKE, NoteKind.APPROXIMATION)
        kind = course.kind[part]
        if part not in course.events:
            course.events[part] = localised(kind, stage.names)
        native.wt_forget_site()
        self._take_inputs(of, number, micro)

        def drop(block: int, event: Any) -> None:
            """Let go of a tensor as the part does, which frees its block unless somebody else holds it."""
            native.wt_scope(int(event["scope"]))
            native.wt_phase(int(event["phase"]))
            micro.stands.pop(block, None)
            native.wt_phase(int(Phase.OTHER))
            native.wt_scope(observer.scope)

        write(kind, course.events[part], micro.part_numbers, native, micro.stands, drop)
        marked = own(list(kind.categories), micro.part_numbers, 0).tolist()
        observer.categories.update(zip(marked, kind.categories.values(), strict=True))
        observer.collector.modules_entered(kind.modules)
        metas, tree = course.returned[part]
        blocks = iter(own(kind.blocks, micro.part_numbers, 0).tolist())
        return pytree.tree_unflatten(
            [self._stand(meta, next(blocks), micro) if isinstance(meta, _Meta) else meta for meta in metas],
            tree,
        )

    def _again(self) -> NoReturn:
        """End this rank's process, so that it is run with all of its micro-batches."""
        self.mailbox.files.again.touch()
        sys.stdout.flush()
        os._exit(0)

    def end(self, of: Any, number: int) -> None:
        """The micro-batch is over: nothing of it is held here."""
        self.stages[of].micros[number].stands.clear()

    def _take_inputs(self, of: Any, number: int, micro: Micro) -> None:
        infos = [*of.args_recv_info.get(number, ()), *of.grad_recv_info.get(number, ())]
        for place, info in enumerate(infos):
            if not info.is_root_arg and info.buffer is not None:
                block = int(self.native.wt_storage_block(info.buffer.untyped_storage()._cdata))
                micro.part_numbers[INPUT + place] = NumberRange((block, 0, 0), (1, 0, 0))

    def _next(self) -> tuple[int, ...]:
        return tuple(int(self.native.wt_take(which, 0)) for which in range(3))

    def _meta(self, leaf: Any) -> Any:
        local = leaf._local_tensor if type(leaf) is DTensor else leaf
        if leaf is None or type(leaf) in (bool, int, float, str):
            return leaf
        if type(local) is not torch.Tensor or not local.is_cuda:
            return f"no tensor {next(unlike)}"  # like nothing else
        storage = local.untyped_storage()
        spec = leaf._spec if type(leaf) is DTensor else None
        shape, stride, offset = tuple(local.shape), local.stride(), int(local.storage_offset())
        words = f"{local.dtype} {shape} {stride} {offset} {storage.nbytes()} {spec and spec.placements}"
        block = int(self.native.wt_storage_block(storage._cdata))
        return _Meta(words, block, storage.nbytes(), shape, stride, offset, local.dtype, spec)

    def _stand(self, meta: _Meta, block: int, micro: Micro) -> torch.Tensor:
        storages = micro.stands.setdefault(block, [])
        with unrecorded(self.native), torch.no_grad():
            if not storages:
                storages.append(
                    torch.empty(meta.bytes // meta.dtype.itemsize, dtype=meta.dtype, device="cuda")
                )
                self.native.wt_adopt(storages[0].untyped_storage()._cdata, block)
            tensor = torch.as_strided(storages[0], meta.shape, meta.stride, meta.offset)
        if meta.spec is None:
            return tensor
        return DTensor(tensor, meta.spec, requires_grad=False)  # type: ignore[call-arg]
