"""A plan as it runs: each group's steps in turn, all collectives in the plan's order on every rank.

What a group does is one generator: it works, yields a collective, gets its result, works on, and ends when
the row holds the mean over ranks. Three threads move generators on:

* the one that runs backward begins them (so encoding on the device delays backward, as the plan reckons);
* *network* calls the collectives, one at a time, in the plan's order, which is the same on all ranks: ranks
  whose gradients come in another order wait, they do not mix calls up;
* *host* does what follows a collective, and all of groups whose option is on the host.

On failure: whoever waits for a peer that is gone or silent gets `HostError` at the deadline; every future
that is open gets it, so backward ends with it, and so does every later step: the connections are spent.

On CUDA each thread has a stream, and what is handed on waits for what the giver's stream has done.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.training.gradsync.live.codecs import Codec, find, seed_of
from windtunnel.training.gradsync.live.collectives import Collectives
from windtunnel.training.gradsync.live.exchange import DEADLINE, Peers
from windtunnel.training.gradsync.live.feedback import Feedback, State
from windtunnel.training.gradsync.live.lowrank import LowRank, Shape
from windtunnel.training.gradsync.live.sparse import reduce_with
from windtunnel.training.gradsync.model import Plan, Scope

Call = Callable[[], Tensor]
Steps = Generator[Call, Tensor, None]
Outcome = torch.futures.Future[Tensor | Exception]
ENDING = 5.0
"""Seconds that threads have to end; one that waits for a peer that is gone takes until the deadline."""


@dataclass
class _Run:
    """A group in one step of training."""

    group: int
    steps: Steps
    future: Outcome
    result: Tensor
    call: Call | None = None
    done: torch.cuda.Event | None = None


class Executor:
    """Runs a plan's groups. ``shapes``: of each group's parameters by name, in the order of its row.
    ``deadline``: seconds that a collective may take. All ranks make it at once."""

    def __init__(
        self, plan: Plan, shapes: Sequence[Mapping[str, Shape]], device: torch.device,
        group: dist.ProcessGroup | None = None, deadline: float = DEADLINE, feedback: Feedback | None = None,
    ) -> None:  # fmt: skip
        self.plan, self._device, self._deadline = plan, device, deadline
        hierarchical = any(one.option.inside != "flat" for one in plan.groups)
        self._calls = Collectives(plan.hosts, group, deadline, hierarchical=hierarchical)
        self.world, self.rank = self._calls.members["flat"].size, self._calls.members["flat"].rank
        self._codecs = [
            None if one.option.scheme == "sparse" else find(one.option.codec) for one in plan.groups
        ]
        sizes = [{name: torch.Size(shape).numel() for name, shape in one.items()} for one in shapes]
        self.feedback = feedback or Feedback(sizes)
        self._low = {
            place: LowRank(codec.rank, shapes[place], plan.seed)
            for place, codec in enumerate(self._codecs)
            if codec is not None and codec.rank
        }
        self.steps = [0] * len(plan.groups)
        # a sparse sum is one call, whatever it sends
        order = [group for group, _ in plan.order]
        sparse = {place for place, codec in enumerate(self._codecs) if codec is None}
        self._order = [
            one for place, one in enumerate(order) if one not in sparse or one not in order[:place]
        ]
        self._ready = threading.Condition()
        self._waiting: dict[int, _Run] = {}
        self._failed: Exception | None = None
        self._host: queue.SimpleQueue[tuple[_Run, Tensor | None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=target, name=f"gradsync-{name}", daemon=True)
            for name, target in (("network", self._run_network), ("host", self._run_host))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._stop)

    def begin(self, group: int, row: Tensor, result: Tensor) -> Outcome:
        """Synchronise a group whose gradients are in ``row`` (1-D, contiguous; or COO for a sparse sum). The
        future has ``result`` when ``row`` holds the mean over ranks, or the exception that it ended with."""
        future: Outcome = torch.futures.Future(
            devices=[self._device] if self._device.type == "cuda" else None
        )
        run = _Run(group, self._steps(group, row), future, result)
        if self._failed is not None:
            future.set_result(self._failed)
        elif self.plan.groups[group].option.device == "host":
            self._mark(run)
            self._host.put((run, None))
        else:
            self._advance(run, None)
        return future

    def state(self) -> dict[str, Any]:
        """How often each group was synchronised, by its parameters, and factors of low rank."""
        steps = {
            name: self.steps[place] for place, one in enumerate(self.plan.groups) for name in one.tensors
        }
        factors = {name: one for low in self._low.values() for name, one in low.state_dict().items()}
        return {"steps": steps, "factors": factors}

    def load(self, state: Mapping[str, Any], waits: State) -> None:
        """The inverse of `state`, and of the feedback's."""
        for place, one in enumerate(self.plan.groups):
            self.steps[place] = max(state.get("steps", {}).get(name, 0) for name in one.tensors)
        self.feedback.load_state_dict(waits, self._device)
        for low in self._low.values():
            low.load_state_dict(state.get("factors", {}))

    def close(self) -> None:
        """End the threads and give up the groups; nothing may be under way."""
        atexit.unregister(self._stop)
        self._stop()
        if self._failed is None and dist.is_initialized():
            self._calls.close()

    def _stop(self) -> None:
        """A thread that is in the middle of a call when the interpreter ends would abort the process."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        self._host.put(None)
        for thread in self._threads:
            thread.join(ENDING)

    # -- threads

    def _run_network(self) -> None:
        with self._stream():
            while self._order:
                for group in self._order:
                    with self._ready:
                        while group not in self._waiting and not self._closed:
                            self._ready.wait()
                        if self._closed:
                            return
                        run = self._waiting.pop(group)
                    self._take(run)
                    assert run.call is not None
                    try:
                        found = run.call()
                    except Exception as error:  # whatever it is, backward must not wait for ever
                        self._fail(run, error)
                        return
                    self._mark(run)
                    self._host.put((run, found))

    def _run_host(self) -> None:
        with self._stream():
            while (given := self._host.get()) is not None:
                self._take(given[0])
                self._advance(*given)

    def _advance(self, run: _Run, found: Tensor | None) -> None:
        """Work up to the next collective, or to the end."""
        try:
            run.call = next(run.steps) if found is None else run.steps.send(found)
        except StopIteration:
            run.future.set_result(run.result)
            return
        except Exception as error:
            self._fail(run, error)
            return
        self._mark(run)
        with self._ready:
            self._waiting[run.group] = run
            self._ready.notify_all()
            failed = self._failed
        if failed is not None:
            self._fail(run, failed)

    def _fail(self, run: _Run, error: Exception) -> None:
        with self._ready:
            self._failed = self._failed or error
            waiting = [one for one in self._waiting.values() if one is not run]
            self._waiting.clear()
        for one in (run, *waiting):
            if not one.future.done():
                one.future.set_result(self._failed)

    def _stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def _mark(self, run: _Run) -> None:
        """What this thread's stream has done for ``run`` is what the next one waits for."""
        if self._device.type == "cuda":
            run.done = torch.cuda.Event()
            run.done.record()

    def _take(self, run: _Run) -> None:
        if run.done is not None:
            torch.cuda.current_stream().wait_event(run.done)

    # -- what a group does

    def _steps(self, group: int, row: Tensor) -> Steps:
        option, codec = self.plan.groups[group].option, self._codecs[group]
        step = self.steps[group]
        self.steps[group] += 1
        if codec is None:
            yield from self._sparse(group, row, option.codec)
            return
        seed = seed_of(self.plan.seed, step, group)
        if option.inside == "flat":
            yield from self._sum("flat", group, row, 0, codec, seed)
            row.div_(self.world)
            return
        places = self._calls.members["inside"].size
        padded = _padded(row, places)
        part = padded.numel() // places
        place = self._calls.members["inside"].rank
        if option.inside == "plain":
            mine = torch.empty(part, dtype=row.dtype, device=row.device)
            yield lambda: self._calls.reduce_scatter("inside", mine, padded)
        else:
            mine = yield from self._slice_sum("inside", group, padded, 0, codec, seed)
        yield from self._sum("between", group, mine, place * part, codec, seed + 1)
        mine.div_(self.world)
        if option.inside == "plain":
            found = yield lambda: self._calls.all_gather("inside", mine)
            row.copy_(found[: row.numel()])
            return
        code = self._encoded_again(group, mine, place * part, codec, seed + 2, places)
        yield from self._spread("inside", row, code, part, codec, seed + 2)

    def _sum(self, scope: Scope, group: int, row: Tensor, at: int, codec: Codec, seed: int) -> Steps:
        """``row``, which begins at element ``at`` of the group, becomes the sum over the ranks of a scope."""
        scheme, members = self.plan.groups[group].option.scheme, self._calls.members[scope].size
        if members == 1:
            return
        if codec.rank:
            yield from self._low_rank(scope, group, row, codec)
        elif scheme == "allreduce":
            code = self._encoded(group, row, at, codec, seed)
            yield lambda: self._calls.all_reduce(scope, code)
            if code.data_ptr() != row.data_ptr():
                codec.decode(code, row, seed)
        elif scheme == "allgather":
            own = seed_of(seed, 0, 0, self._calls.members[scope].rank)
            code = self._encoded(group, row, at, codec, own)
            found = yield lambda: self._calls.all_gather(scope, code)
            row.zero_()
            for rank, one in enumerate(found.chunk(members)):
                codec.add(one, row, seed_of(seed, 0, 0, rank))
        else:
            padded = _padded(row, members)
            part = padded.numel() // members
            mine = yield from self._slice_sum(scope, group, padded, at, codec, seed)
            begin = at + self._calls.members[scope].rank * part
            code = self._encoded_again(group, mine, begin, codec, seed + 1)
            yield from self._spread(scope, row, code, part, codec, seed + 1)

    def _slice_sum(
        self, scope: Scope, group: int, padded: Tensor, at: int, codec: Codec, seed: int
    ) -> Generator[Call, Tensor, Tensor]:
        """This rank's slice of the sum: every rank gets the codes of its own from all."""
        members = self._calls.members[scope].size
        part = padded.numel() // members
        own = seed_of(seed, 0, 0, self._calls.members[scope].rank)
        codes = [
            self._encoded(group, one, at + place * part, codec, own)
            for place, one in enumerate(padded.split(part))
        ]
        found = yield lambda: self._calls.all_to_all(scope, codes)
        total = torch.zeros(part, dtype=padded.dtype, device=padded.device)
        for rank, one in enumerate(found.chunk(members)):
            codec.add(one, total, seed_of(seed, 0, 0, rank))
        return total

    def _spread(self, scope: Scope, row: Tensor, code: Tensor, part: int, codec: Codec, seed: int) -> Steps:
        """``row`` becomes what the codes of all ranks' slices stand for."""
        found = yield lambda: self._calls.all_gather(scope, code)
        members = self._calls.members[scope].size
        whole = torch.empty(part * members, dtype=row.dtype, device=row.device)
        for one, out in zip(found.chunk(members), whole.split(part), strict=True):
            codec.decode(one, out, seed)
        row.copy_(whole[: row.numel()])

    def _encoded(self, group: int, row: Tensor, at: int, codec: Codec, seed: int) -> Tensor:
        return self.feedback.encode(group, row, codec, seed, at)

    def _encoded_again(
        self, group: int, total: Tensor, at: int, codec: Codec, seed: int, times: float = 1.0
    ) -> Tensor:
        """The code of a slice of the sum; what it leaves out waits here, as if it had been this rank's own
        gradient. ``times``: of the mean, which the ranks of one place on all hosts encode alike, each lets
        its part of the whole wait."""
        code = codec.encode(total, seed)
        self.feedback.left_out(group, total, code, codec, seed, at, times)
        return code

    def _low_rank(self, scope: Scope, group: int, row: Tensor, codec: Codec) -> Steps:
        low, members = self._low[group], self._calls.members[scope].size
        corrected = self.feedback.corrected(group, row, codec)
        first = low.first(corrected)
        yield lambda: self._calls.all_reduce(scope, first)
        second = low.second(corrected, first)
        yield lambda: self._calls.all_reduce(scope, second)
        if corrected is not row:
            low.add(first, second, corrected, -1 / members)
        low.add(first, second, row.zero_())

    def _sparse(self, group: int, row: Tensor, scheme: str) -> Steps:
        whole = self._calls.members["flat"]
        if whole.size == 1:
            return
        peers = Peers(whole.group, self._deadline)
        # the plan says which scheme; all ranks have the same one, which was agreed on when it was applied
        found = yield lambda: reduce_with(peers, row, "row", scheme, seed=self.plan.seed).div_(self.world)
        if row.layout == torch.strided:
            row.copy_(found)
        else:
            row.resize_as_(found)
            row.copy_(found)


def _padded(row: Tensor, parts: int) -> Tensor:
    """With zeros behind it, to ``parts`` equal parts."""
    lacks = -row.numel() % parts
    return torch.nn.functional.pad(row, (0, lacks)) if lacks else row
