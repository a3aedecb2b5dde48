"""A plan as it runs: all collectives in the plan's order on every rank, whatever order gradients come in.

What a group does is one generator: it works, yields a collective, gets its result, works on, and ends when
the row holds the mean over ranks. Three threads move generators on:

* the one that runs backward begins them (so encoding on the device delays backward, as the plan reckons);
* *network* calls the collectives, one at a time, in the plan's order, which is the same on all ranks: ranks
  whose gradients come in another order wait, they do not mix calls up;
* *work* does what follows a collective.

On failure: whoever waits for a peer that is gone or silent gets `HostError`, at the deadline at last; every
group that is under way ends with it, so backward does, and so does every later step: the connections are
spent. A rank that ends in the midst of a step cuts its own (`close`), so no peer waits for it, nor it for
one that is silent.

On CUDA each thread has a stream, and what is handed on waits for what the giver's stream has done.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.linux.sockets import SocketRecorder
from windtunnel.training.gradsync.live.codecs import Codec, find, seed_of
from windtunnel.training.gradsync.live.exchange import Peers, scopes
from windtunnel.training.gradsync.live.feedback import Feedback
from windtunnel.training.gradsync.live.sparse import reduce_with
from windtunnel.training.gradsync.model import NONE, Option, Scope, SyncPlan

Call = Callable[[], Any]
Steps = Generator[Call, Any, None]
Done = Callable[[Exception | None], object]
"""Called when a group's row holds the mean over ranks, or with what it ended with; by any thread."""
ENDING = 1.0
"""Seconds that threads have to end before the connections on which one may wait are cut."""


@dataclass
class _LiveGroup:
    """One of a plan's, at ``place`` in it. ``peers``: of a scope, for one collective.
    ``seed``: the plan's. ``step``: how often it was synchronised.

    What the code of a *sum* leaves out waits on the rank that made it, as if it had been that rank's own
    gradient.
    """

    place: int
    option: Option
    codec: Codec
    peers: Callable[[Scope], Peers]
    feedback: Feedback
    seed: int
    step: int = 0

    def begin(self, row: Tensor) -> Steps:
        """``row`` (1-D, contiguous; or COO for a sparse sum) becomes the mean over ranks."""
        seed, world = seed_of(self.seed, self.step, self.place), self.peers("flat").size
        self.step += 1
        if self.option.inside != "flat":
            yield from self._by_hosts(row, seed, world)
            return
        yield from self._sum("flat", row, 0, seed)
        row.div_(world)

    def _by_hosts(self, row: Tensor, seed: int, world: int) -> Steps:
        """The mean: slices are added up inside each host, then between hosts, and gathered inside."""
        inside = self.peers("inside")
        if self.option.inside == "plain":
            padded = _padded(row, inside.size)
            mine = yield lambda: self.peers("inside").reduce_scatter(padded)
        else:
            mine = yield from self._slice("inside", row, 0, seed)
        yield from self._sum("between", mine, inside.rank * mine.numel(), seed + 1)
        mine.div_(world)
        if self.option.inside == "plain":
            gathered = yield lambda: self.peers("inside").all_gather(mine)
            row.copy_(gathered[: row.numel()])
        else:
            # of the mean, which the ranks of this place on all hosts encode alike, each lets its part wait
            yield from self._spread("inside", row, mine, 0, seed + 2, inside.size)

    def _sum(self, scope: Scope, row: Tensor, at: int, seed: int) -> Steps:
        """``row``, which begins at element ``at`` of the group, becomes the sum over the ranks of a scope."""
        peers, codec = self.peers(scope), self.codec
        if peers.size == 1:
            return
        if self.option.scheme == "sparse":
            # all ranks have the plan's scheme, which was agreed on when it was applied
            scheme = self.option.codec
            result = yield lambda: reduce_with(self.peers(scope), row, scheme, seed=self.seed)
            if row.layout != torch.strided:
                row.resize_as_(result)
            row.copy_(result)
        elif self.option.scheme == "allreduce":
            code = self.feedback.encode(self.place, row, codec, seed, at)
            yield lambda: self.peers(scope).all_reduce(code)
            if code.data_ptr() != row.data_ptr():
                codec.decode(code, row)
        elif self.option.scheme == "allgather":
            code = self.feedback.encode(self.place, row, codec, seed_of(seed, 0, 0, peers.rank), at)
            result = yield lambda: self.peers(scope).all_gather(code)
            self._add_up(result.chunk(peers.size), row.zero_())
        else:
            mine = yield from self._slice(scope, row, at, seed)
            yield from self._spread(scope, row, mine, at, seed + 1)

    def _slice(self, scope: Scope, row: Tensor, at: int, seed: int) -> Generator[Call, Any, Tensor]:
        """This rank's slice of the sum: every rank gets the codes of its own from all."""
        peers = self.peers(scope)
        own = seed_of(seed, 0, 0, peers.rank)
        parts = _padded(row, peers.size).chunk(peers.size)
        codes = [
            self.feedback.encode(self.place, part, self.codec, own, at + place * part.numel())
            for place, part in enumerate(parts)
        ]
        received = yield lambda: self.peers(scope).all_to_all(codes)
        total = torch.zeros_like(parts[0])
        self._add_up(received.chunk(peers.size), total)
        return total

    def _spread(
        self, scope: Scope, row: Tensor, mine: Tensor, at: int, seed: int, times: float = 1.0
    ) -> Steps:
        """``row`` becomes what the codes of all ranks' slices stand for; ``times`` of what the code of
        ``mine``, this rank's, leaves out waits here."""
        peers, code = self.peers(scope), self.codec.encode(mine, seed)
        begin = at + peers.rank * mine.numel()
        self.feedback.left_out(self.place, mine, code, self.codec, begin, times)
        codes = yield lambda: self.peers(scope).all_gather(code)
        whole = row.new_empty(peers.size * mine.numel())
        for part, out in zip(codes.chunk(peers.size), whole.chunk(peers.size), strict=True):
            self.codec.decode(part, out)
        row.copy_(whole[: row.numel()])

    def _add_up(self, codes: Sequence[Tensor], out: Tensor) -> None:
        for code in codes:
            self.codec.add(code, out)


def _padded(row: Tensor, parts: int) -> Tensor:
    """With zeros behind it, to ``parts`` equal parts."""
    lacks = -row.numel() % parts
    return torch.nn.functional.pad(row, (0, lacks)) if lacks else row


@dataclass
class _GroupRun:
    """A group in one step of training."""

    group: int
    steps: Steps
    done: Done
    call: Call | None = None
    mark: torch.cuda.Event | None = None


class PlanExecutor:
    """Runs a plan's groups. ``deadline``: seconds that a collective may take. All ranks make it at once."""

    def __init__(
        self, plan: SyncPlan, device: torch.device, feedback: Feedback, group: dist.ProcessGroup | None,
        deadline: float,
    ) -> None:  # fmt: skip
        self._cuda, self._device = device.type == "cuda", device
        hierarchical = any(group.option.inside != "flat" for group in plan.groups)
        self._sockets = SocketRecorder()
        with self._sockets.recording():
            self._scopes = scopes(plan.hosts, group, deadline, hierarchical=hierarchical)

        def peers(scope: Scope) -> Peers:
            return Peers(self._scopes[scope], deadline)

        self._groups = []
        for place, planned in enumerate(plan.groups):
            codec = find(NONE if planned.option.scheme == "sparse" else planned.option.codec)
            self._groups.append(_LiveGroup(place, planned.option, codec, peers, feedback, plan.seed))
        self._order = [group for group, _ in plan.order]
        self._ready = threading.Condition()
        self._waiting: dict[int, _GroupRun] = {}
        self._failed: Exception | None = None
        self._arrived: queue.SimpleQueue[tuple[_GroupRun, Tensor] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._run_network, self._run_work)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @property
    def options(self) -> list[Option]:
        """What each group is synchronised by."""
        return [group.option for group in self._groups]

    def begin(self, group: int, row: Tensor, done: Done) -> None:
        """Synchronise a group whose gradients are in ``row`` (1-D, contiguous; or COO for a sparse sum)."""
        run = _GroupRun(group, self._groups[group].begin(row), done)
        if self._failed is not None:
            done(self._failed)
        else:
            self._advance(run, None)

    @property
    def steps(self) -> int:
        """How often groups were synchronised."""
        return max(group.step for group in self._groups)

    def go_on(self, steps: int) -> None:
        """As after so many steps: no random number is drawn twice."""
        for group in self._groups:
            group.step = steps

    def close(self) -> None:
        """End the threads and give up the groups. Between two steps that takes no time. In the midst of one,
        as when the process ends by an exception, a thread is in a call: it comes out of it as its connections
        are cut (NCCL's: by the deadline). One that came back while the interpreter ends would abort the
        process."""
        atexit.unregister(self.close)
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        self._arrived.put(None)
        for thread in self._threads:
            thread.join(ENDING)
        if any(thread.is_alive() for thread in self._threads):
            self._sockets.cut()
            for thread in self._threads:
                thread.join()
        if self._failed is None and dist.is_initialized():
            for scope in self._scopes.values():
                dist.destroy_process_group(scope)
        self._scopes.clear()

    def _run_network(self) -> None:
        with self._stream():
            for group in cycle(self._order):
                with self._ready:
                    while group not in self._waiting and not self._closed:
                        self._ready.wait()
                    if self._closed:
                        return
                    run = self._waiting.pop(group)
                self._take(run)
                assert run.call is not None
                try:
                    result = run.call()
                except Exception as error:  # whatever it is, backward must not wait for ever
                    self._fail(run, error)
                    return
                self._mark(run)
                self._arrived.put((run, result))

    def _run_work(self) -> None:
        with self._stream():
            while (arrived := self._arrived.get()) is not None:
                self._take(arrived[0])
                self._advance(*arrived)

    def _advance(self, run: _GroupRun, tensor: Tensor | None) -> None:
        """Work up to the next collective, or to the end."""
        try:
            run.call = run.steps.send(tensor)
        except StopIteration:
            run.done(None)
            return
        except Exception as error:
            self._fail(run, error)
            return
        self._mark(run)
        with self._ready:
            failed = self._failed
            if failed is None:
                self._waiting[run.group] = run
                self._ready.notify_all()
        if failed is not None:
            run.done(failed)

    def _fail(self, run: _GroupRun, error: Exception) -> None:
        with self._ready:
            self._failed = self._failed or error
            ended = [run, *self._waiting.values()]
            self._waiting.clear()
        for stopped in ended:
            stopped.done(self._failed)

    def _stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self._device)) if self._cuda else nullcontext()

    def _mark(self, run: _GroupRun) -> None:
        """What this thread's stream has done for ``run`` is what the next one waits for."""
        if self._cuda:
            run.mark = torch.cuda.Event()
            run.mark.record()

    def _take(self, run: _GroupRun) -> None:
        if run.mark is not None:
            torch.cuda.current_stream().wait_event(run.mark)
