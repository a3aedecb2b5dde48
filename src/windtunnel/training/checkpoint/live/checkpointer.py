"""`PeerCheckpointer`: a training loop's checkpoints in its own and its peers' memory (GEMINI, SOSP 2023).

    ck = PeerCheckpointer(job, copies=2)
    for step in range(ck.restore(state), steps):
        ...  # train
        ck.step(step, state)

`step` copies the state into a slot of this host's memory; the copies in other hosts' memory are made in the
background, by the host's agent, which outlives this process. A step is committed when all copies of all
ranks' shards are complete. A slot is overwritten only when a newer step than the one in it is committed
(`policy.slots`), so whatever is lost, the newest committed step is still whole.

Tensors that all ranks hold alike (a DDP replica) are found once, by agreement on their content, and then lie
in the shard "shared" of every host's memory, without being sent. They are compared again now and then;
what differs from then on is saved for each rank, and the run's events say so.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import index
from typing import Any

import torch

from windtunnel.base.errors import UserError
from windtunnel.store import eventlog
from windtunnel.training.checkpoint.live import objects, snapshot, spans
from windtunnel.training.checkpoint.live.access import (
    Access,
    MemoryLost,
    Stored,
    attach,
)
from windtunnel.training.checkpoint.live.memory import StaleGeneration
from windtunnel.training.checkpoint.live.restore import restore
from windtunnel.training.checkpoint.live.snapshot import agree_alike
from windtunnel.training.checkpoint.live.state import State, walk
from windtunnel.training.checkpoint.live.whole import Whole, store
from windtunnel.training.checkpoint.model import SHARED
from windtunnel.training.checkpoint.policy import Slot, SlotWanted, decide
from windtunnel.training.checkpoint.policy.slots import EMPTY, WHY
from windtunnel.training.checkpoint.settings import CheckpointSettings, settings
from windtunnel.training.elastic.policy.checkpoints import FAILED, PENDING, WANTED

_RECHECK = 64  # saves between two comparisons of what all ranks hold alike
_PAUSE = 0.002
_WORD = 10.0  # seconds until a rank hears of a new generation that its agent knows of
_SLICE = 0.05  # seconds between two looks at the membership while waiting


class PeerCheckpointer:
    """Keeps the state of one rank's training loop; made once in each call of the training function.

    ``options``: see `CheckpointSettings`. Without a supervisor (``job.memory`` is None) only ``persist``
    works: checkpoints go to storage each ``persist_every`` steps.

    Raises:
        UserError: an option that is not accepted.
    """

    def __init__(self, job: Any, **options: Any) -> None:
        self.job = job
        self.settings: CheckpointSettings = settings(options)
        job_state = job.keep("checkpoint", dict)
        before: PeerCheckpointer | None = job_state.pop("current", None)
        if before is not None:
            before._end()  # its thread may still write into the slots that this one is about to use
        serials = job_state.setdefault("serials", {})
        self._serial = serials[job.generation] = serials.get(job.generation, -1) + 1
        self._access: Access | None = attach(job, self.settings)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windtunnel-checkpoint")
        self._pending: Future[None] | None = None
        self._plan: snapshot.SnapshotPlan | None = None
        self._shared: frozenset[str] | None = None
        self._slot_steps: list[int] = []
        self._views: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._newest = -1  # that was saved or restored
        self._begun = False
        self._ended = False
        self._base = -1  # what all went back to, where copies of it are still to be made
        self._due = EMPTY  # the newest step that is to go to storage
        self._calls = 0  # of `step` that saved or should have: alike on all ranks
        self._restores = 0
        self._outside: set[str] = set()  # doubts about loaders that are not in the state
        self._warned = False  # that nothing is kept
        self._idle: spans.IdleSender | None = None
        job_state["current"] = self
        job.at_end(self._last)

    def restore(self, state: State) -> int:
        """Put the newest state that all ranks can have into ``state``; the step to go on with, 0 if there was
        nothing.

        ``state``: name to module, optimizer, `StatefulDataLoader` (its next iteration is the rest of the
        epoch that it was in), anything with ``state_dict`` and ``load_state_dict``, tensor,
        or plain value (which is replaced in ``state``). All ranks call it.

        Raises:
            LessError: there was a committed step, nothing of it can be restored, and the job may not begin
                anew (``on_no_checkpoint``).
            UserError: what was saved is of another state; nothing was changed.
            MembershipChanged: the membership changed meanwhile.
        """
        objects.require_stateful(state)
        self._restores, self._newest = self._restores + 1, -1
        if self._access is None and not self.settings.persist:
            return 0
        with self._current():
            self._settle()  # the slots are about to be used otherwise
            restored = restore(
                self.job,
                self._access or Stored(self.settings.persist),
                state,
                key=f"{self._serial}.{self._restores}",
                rng=self.settings.rng,
                restart=self.settings.on_no_checkpoint == "restart",
                patience=self.settings.load,
            )
            step = self._newest = -1 if restored is None else restored.step
            self._begin(step)
            if restored is not None and self._access is not None:
                if restored.store and self.settings.persist:
                    self._want(step)
                if restored.shards is not None:
                    self._access.save_again(step, restored.shards)
                    if self.settings.mode == "idle":
                        self._access.memory.flush()  # nobody opens windows yet
                    self._base = step
                    if step == self._due:
                        self._pending = self._pool.submit(self._access.persist, step)
                elif step == self._due:  # a job of another size has other shards
                    self._save(step, state)
        return step + 1

    def step(self, step: int, state: State) -> None:
        """Step ``step`` is complete: save ``state`` as it is now. Returns when it is in this host's memory.
        Numbers grow from call to call, through all epochs: copies of another state would pass for one of two
        steps of one number.

        Raises:
            UserError: the state cannot be saved, the memory for it is not there, or the number does not grow.
            MembershipChanged: the membership changed.
        """
        objects.require_stateful(state)
        step = index(step)
        if step <= self._newest:
            after = f"after step {self._newest}" if self._newest >= 0 else "is the first"
            raise UserError(f"PeerCheckpointer: step {step} {after}; numbers that grow from 0 are accepted")
        self._newest = step
        with self._current():
            self._step(step, state)

    def _step(self, step: int, state: State) -> None:
        self._settle()
        self.job.check()
        chosen = self.settings
        if self._access is None:
            self._store(step, state)
            return
        if not self._begun:
            self._begin(-1)
        if self._idle is not None:
            self._idle.step_ended()
        if (step + 1) % self._interval():
            return
        # the first save at or after each `persist_every` steps goes to storage
        if chosen.persist and (step + 1) % chosen.persist_every < self._interval():
            self._want(step)
        self._save(step, state)

    def _save(self, step: int, state: State) -> None:
        assert self._access is not None
        chosen = self.settings
        tensors_, others = walk(state, chosen.rng)
        tensors: snapshot.Tensors = tensors_
        packed = objects.pack(others)
        self._prepare(state, tensors, others, packed)
        self._calls += 1
        self.job.guarantee(self._doubts(state))
        slot = self._slot(step)
        if slot is None:
            return
        assert self._plan is not None
        self.job.at("before_local_write", step)
        self._slot_steps[slot] = EMPTY
        self._access.begin(self._plan, slot, step)
        self._put_objects(packed, slot)
        checksums = self._copy(tensors, slot, step)
        self._pending = self._pool.submit(self._finish, slot, step, checksums, others, packed)
        learning = self._idle is not None and self._idle.learning
        if chosen.mode == "blocking" or learning:
            self._settle()
            self._wait_committed(step)
        if self._idle is not None and learning:
            self._idle.resume()

    def committed(self) -> int:
        """The newest step whose copies are all known to be there, in this generation; -1 for none yet."""
        return self._access.memory.committed() if self._access else -1

    def flush(self) -> bool:
        """Wait, up to ``patience``, until the newest save is committed; whether it is.

        Raises:
            MembershipChanged: the membership changed.
        """
        with self._current():
            self._settle()
            if self._access is None:
                return True
            newest = max(self._slot_steps, default=self._base)
            if self._idle is not None:
                self._access.memory.flush()
            return newest == EMPTY or self._wait_committed(newest)

    def close(self) -> None:
        """Flush, and let go of the slots. The agent keeps the checkpoints until the run ends."""
        try:
            self.flush()
        finally:
            self._end()

    def _last(self) -> None:
        """The training function has returned: what was due to storage is to be there when the job ends."""
        if self._access is None:
            return
        if not self._ended:  # what was closed before was flushed
            self.flush()
        end = time.monotonic() + self.settings.stored
        while self._due != EMPTY and self.job.stored(self._due) == PENDING:
            self.job.check()
            if time.monotonic() > end:
                why = f"it was not there {self.settings.stored:g} s after the last step"
                self.job.event(FAILED, step=self._due, error=why)
                return
            time.sleep(_SLICE)

    def _want(self, step: int) -> None:
        """``step`` is to go to storage."""
        self._due = step
        if self.job.rank == 0:
            self.job.event(WANTED, step=step, url=self.settings.persist)

    # What follows is in the order of a save.

    def _prepare(
        self, program: State, tensors: snapshot.Tensors, others: dict[str, Any], packed: bytes
    ) -> None:
        """A plan that fits, and slots for it."""
        plan = self._plan
        fits = (
            plan is not None
            and plan.tail >= objects.LENGTH + len(packed)
            and plan.signature == snapshot.signature(tensors)
        )
        shared = self._shared
        nothing_saved = self._calls and not shared  # that there is nothing
        again = self._calls <= 1 or not self._calls % _RECHECK
        if self.job.world > 1 and again and not nothing_saved:
            shared = agree_alike(self.job, program, tensors, self._shared, f"{self._serial}.{self._calls}")
        if fits and shared == self._shared:
            return
        assert self._access is not None
        if plan is None:
            objects.check(others)
        self._shared = shared
        self._views.clear()
        self._plan = snapshot.plan(tensors, tuple(others), len(packed), shared, f"rank{self.job.rank}")
        self._slot_steps = self._access.reserve(self._plan)
        if self.job.rank == 0:
            self._tell_needs(self._access.memory.needs)
        if self.settings.mode == "idle" and self._idle is None:
            own = self._plan.layouts[f"rank{self.job.rank}"]
            self._idle = spans.IdleSender(self.job, self._access.memory, self.settings, own.nbytes)

    def _tell_needs(self, needs: str) -> None:
        job_state = self.job.keep("checkpoint", dict)
        if job_state.get("needs") != needs:
            job_state["needs"] = needs
            self.job.event("note", text=f"checkpoints take memory on each host: {needs}; {WHY}")

    def _doubts(self, state: State) -> list[str]:
        if self._calls <= 2:  # in the first step a loop may still be about to begin its epoch
            self._outside |= set(objects.read_outside(state))
        more = [] if self.settings.rng else ["rng=False: no generator is saved"]
        return [*objects.loader_doubts(state), *sorted(self._outside), *more]

    def _slot(self, step: int) -> int | None:
        """The slot that ``step`` goes to, once it may be overwritten; None where that takes too long, and the
        step is not saved. One rank says what was decided for all in the run's events."""
        wanted, slot = self._slot_decision(step)
        end = time.monotonic() + self.settings.patience
        while not slot.free and time.monotonic() < end:
            self._wait(self.committed() + 1)
            wanted, slot = self._slot_decision(step)
        if not slot.free:
            self._give_up(step)
            wanted, slot = self._slot_decision(step)
        if self.job.rank == 0:
            self.job.event("decision", **eventlog.decided("training.checkpoint", "newest", wanted, slot))
        if slot.free:
            return slot.index
        text = f"step {step} was not saved: step {self.committed()} is the newest committed one"
        self.job.event("note", text=text)
        if step == self._due:
            self.job.event(FAILED, step=step, error="it was not saved in memory")
        return None

    def _slot_decision(self, step: int) -> tuple[SlotWanted, Slot]:
        wanted = SlotWanted(step, tuple(self._slot_steps), self.committed(), self._base)
        slot = decide(wanted)
        assert isinstance(slot, Slot)
        return wanted, slot

    def _give_up(self, step: int) -> None:
        """Steps that some rank did not save can never be committed: agree on them and free their slots."""
        # A base that gets no copies holds all up; everybody has it at home, which must do.
        mine = [slot_step for slot_step in self._slot_steps if slot_step != EMPTY and slot_step >= self._base]
        try:
            answers = self.job.agree(f"stuck/{self._serial}.{step}", mine, min(self.settings.patience, 10.0))
        except TimeoutError:
            return  # the others could save this step; the next time all are stuck together
        everywhere = set.intersection(*(set(steps) for steps in answers.values()))
        if self.committed() < self._base:
            self.job.event("note", text=f"step {self._base}, which all went back to, lacks copies")
        self._base = -1
        self._slot_steps = [
            slot_step if slot_step in everywhere or slot_step <= self.committed() else EMPTY
            for slot_step in self._slot_steps
        ]

    def _put_objects(self, packed: bytes, slot: int) -> None:
        assert self._access is not None and self._plan is not None
        for shard, layout in self._plan.layouts.items():
            if layout.tail and self._access.writes(shard):
                snapshot.put_objects(packed, layout.tail, self._access.data(shard, slot))

    def _copy(self, tensors: snapshot.Tensors, slot: int, step: int) -> dict[str, str]:
        """The tensors into their places; the shards' checksums."""
        assert self._access is not None and self._plan is not None
        checksums = {}
        for shard, layout in self._plan.layouts.items():
            if not self._access.writes(shard):
                continue
            data = self._access.data(shard, slot)
            moves = self._plan.moves[shard]
            if (shard, slot) not in self._views:
                self._views[shard, slot] = snapshot.views(layout, moves, data)
            self.job.at("during_local_write", step)
            checksums[shard] = snapshot.copy_hashed(tensors, layout, moves, self._views[shard, slot], data)
        return checksums

    def _finish(
        self, slot: int, step: int, checksums: dict[str, str], others: dict[str, Any], packed: bytes
    ) -> None:
        """Headers, and word to the agent; what all ranks hold alike first, so that a rank's word for its own
        shard vouches for it, too."""
        assert self._access is not None
        objects.check(others, packed)  # a later state may have what none before had
        written = sorted(checksums, key=lambda name: name != SHARED)
        for shard in written:
            self._access.complete(shard, slot, checksums[shard])
        self.job.at("after_local_write", step)
        self.job.at("before_commit", step)
        for shard in written:
            self._access.saved(shard, slot, step)
        self._slot_steps[slot] = step
        if self._idle is not None:
            self._idle.saved(step)
        if step == self._due:
            self._access.persist(step)

    def _store(self, step: int, program: State) -> None:
        """Without an agent: to storage, by this process, all ranks together."""
        chosen = self.settings
        if not chosen.persist:
            text, warned, self._warned = (
                "no supervisor and no storage: no checkpoints are made",
                self._warned,
                True,
            )
            if self.job.supervised and not warned:
                self.job.event("note", text=text)
            elif self.job.rank == 0 and not warned:
                warnings.warn(text, stacklevel=4)
            return
        if (step + 1) % chosen.persist_every:
            return
        tensors, others = walk(program, chosen.rng)
        objects.check(others)
        self._calls += 1
        self.job.guarantee(self._doubts(program))
        self.job.at("before_persist", step)
        serial = f"{self._serial}.{self._calls}"
        own = f"rank{self.job.rank}"
        whole = {own: Whole.packed(own, tensors, others)}
        store(self.job, chosen.persist, step, whole, self.job.world, serial, self.job.generation, chosen.keep)

    def _settle(self) -> None:
        """The save before is complete in this host's memory; what went wrong in its thread is raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result(self.settings.patience)

    def _wait(self, step: int) -> bool:
        """A moment for the commit of ``step`` or of a later one; whether it is there."""
        assert self._access is not None
        self.job.check()
        self._access.require_there()
        if self._access.memory.wait_committed(step, _SLICE):
            return True
        time.sleep(_PAUSE)  # it says no at once when the generation is over
        return False

    def _wait_committed(self, step: int) -> bool:
        end = time.monotonic() + self.settings.patience
        while time.monotonic() < end:
            if self._wait(step):
                self.job.at("after_replicated", step)
                return True
        self.job.event("note", text=f"step {step} is not committed after {self.settings.patience:g} s")
        return False

    def _begin(self, step: int) -> None:
        """All ranks go on from ``step``: what the agent holds after it is of an abandoned course."""
        self._begun = True
        courses = self.job.keep("checkpoint", dict).setdefault("courses", {})
        course = courses[self.job.generation] = courses.get(self.job.generation, 0) + 1
        if self._access is not None:
            self._access.memory.restored(step, course)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The agent may know of a change of the membership before this rank, or be gone with it: then wait
        for word of it, a while."""
        try:
            yield
        except MemoryLost:
            raise
        except (StaleGeneration, OSError):
            end = time.monotonic() + _WORD
            while time.monotonic() < end:
                self.job.check()
                time.sleep(_PAUSE)
            raise

    def _interval(self) -> int:
        """Steps from one checkpoint to the next."""
        return self.settings.every * (self._idle.every if self._idle is not None else 1)

    def _end(self) -> None:
        """Let go of the slots; nothing of this object writes any more."""
        self._ended = True
        self._pool.shutdown(wait=True)
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        self._views.clear()
        if self._access is not None:
            self._access.close()
