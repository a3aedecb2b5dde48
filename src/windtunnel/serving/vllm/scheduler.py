"""vLLM's scheduler, asked by the policies of `windtunnel.serving.engine`.

vLLM loads it by ``--scheduler-cls windtunnel.serving.vllm.Scheduler`` and reads `VllmSettings` from
``--additional-config``. It changes three things: which waiting sequences vLLM sees in a step, how many tokens
of each running one it computes, and what it tells of the step. Blocks, batches and outputs are vLLM's own.
Sequences that wait for something else (a grammar, further input, a transfer) are left to vLLM alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.policies import ADMISSION, BRANCHING, choose_policies, event_notes
from windtunnel.serving.engine.policy.step import Depths, StepLimits
from windtunnel.serving.engine.profile import step_time
from windtunnel.serving.prefixcache import policy as prefixcache
from windtunnel.serving.vllm.controller import Arrival, Controller, StepPlan, choose_depths, limit_tokens
from windtunnel.serving.vllm.refusals import REASON
from windtunnel.serving.vllm.settings import VllmSettings
from windtunnel.store import eventlog
from windtunnel.store.runs import Store, StoredRun

CHILD = re.compile(r"\d+_(.+)")
"""What vLLM calls the n answers of one request."""
GATHER = 0.5
"""Seconds of steps that are logged in one write. A write lets vLLM's other threads in, which then hold up the
step that they would else have run beside."""
TICK = 2**20
"""Ticks a second: sums of such times are exact, in the twin, too."""


# On a CPU vLLM never schedules ahead and takes the first one itself: the other does more in each step.
Base: Any = SyncScheduler if current_platform.is_cpu() else AsyncScheduler


class Scheduler(Base):  # type: ignore[misc]
    """See the module. Raises `UserError` where the settings or the policy cannot be used."""

    need_mamba_block_aligned_split: bool
    waiting: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._settings = settings = VllmSettings.read(self.vllm_config.additional_config)
        # the hook through which vLLM asks how many tokens of a sequence it may compute
        self._aligned, self.need_mamba_block_aligned_split = self.need_mamba_block_aligned_split, True
        names, policies = choose_policies(settings.policy, settings.admission)
        limits = self._limits(names)
        self._run: StoredRun | None = None
        self._notes: list[Callable[[], object]] = []
        log = note = None
        self._steps, self._rules = 0, settings.prefix_cache
        if self._rules and self._rules not in prefixcache.POLICIES:
            accepted = ", ".join(prefixcache.POLICIES)
            raise UserError(f"`prefix_cache` {self._rules!r} is unknown; accepted are {accepted}")
        if self._rules and not self._aligned:
            raise UserError(
                f"`prefix_cache` {self._rules!r} is for a hybrid model with --mamba-cache-mode align"
            )
        self._log = self._open_log() if settings.every else None
        if self._log is not None:
            log, note = map(self._later, event_notes(self._log, settings.every, lambda: self._steps))
        self._note_decision = log
        step_times = step_time(settings.step_time).time if settings.step_time else None
        self._plan, self._wall = StepPlan(), time.time() - time.monotonic()
        self._refused: list[Request] = []
        self._output: SchedulerOutput | None = None
        """Of the step that the policies do not know to be scheduled."""
        self._controller = Controller(
            limits,
            step_times,
            block=self.block_size,
            cached=self._cached,
            overlaps=bool(self.scheduler_config.async_scheduling),
            log=log,
            note=note,
            own=policies,
        )

    def _limits(self, names: dict[str, str]) -> StepLimits:
        rows, budget = self.max_num_running_reqs, self.max_num_scheduled_tokens
        if budget <= rows:
            raise UserError(f"--max-num-batched-tokens {budget}: accepted is more than --max-num-seqs {rows}")
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        states = sum(isinstance(spec, MambaSpec) for spec in specs)
        blocks = (self.kv_cache_manager.block_pool.num_gpu_blocks - 1) // max(1, len(specs) - states)
        return StepLimits(
            rows, blocks * self.block_size, min(self._settings.chunk or budget, budget - rows),
            # the last block of a sequence is its own, and so is every state
            state=(1 + 2 * states) * self.block_size,
            admission=names[ADMISSION], branching=names[BRANCHING],
        )  # fmt: skip

    def _open_log(self) -> eventlog.EventLog:
        if self._settings.events:
            return eventlog.EventLog(Path(self._settings.events), gather=GATHER)
        inputs = {"command": "vllm serve", "model": self.vllm_config.model_config.model}
        self._run = Store.open().begin("serving.vllm", {**inputs, **self._settings.additional()}, 0)
        return eventlog.EventLog(self._run.directory / eventlog.NAME, gather=GATHER)

    def _now(self) -> float:
        return int(time.monotonic() * TICK) / TICK

    # sequences come and go

    def add_request(self, request: Request) -> None:
        resumed = request.request_id in self.requests
        super().add_request(request)
        how = request.sampling_params
        if resumed or request.status != RequestStatus.WAITING or request.resumable or how is None:
            return
        if how.seed is not None and current_platform.is_cpu():
            return  # vLLM 0.32 ends on a CPU when it computes a part of a seeded prompt
        extra = how.extra_args or {}
        child = CHILD.fullmatch(request.request_id)
        family = str(extra.get("branch_of") or "") or (child[1] if child else "")
        if not self.cache_config.enable_prefix_caching or request.skip_reading_prefix_cache:
            family = ""  # nothing is shared
        most = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        now = self._now()
        came = min(now, request.arrival_time - self._wall)
        self._controller.arrive(
            Arrival(
                request.request_id, request.prompt_token_ids or request.all_token_ids, most,
                int(came * TICK) / TICK, self._settings.objective(extra), family,
            ),
            now,
        )  # fmt: skip

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._controller.leave(request.request_id)
        return finished

    # a step

    def schedule(self, *given: Any, **named: Any) -> SchedulerOutput:
        self._settle()
        controller = self._controller
        now = self._now()
        controller.done(now)
        self._plan = plan = controller.plan(now)
        if plan.refused:
            self._refused += super().finish_requests(plan.refused, RequestStatus.FINISHED_ABORTED)
        paused: list[Request] = []
        if self.waiting:
            every, self.waiting = list(self.waiting), create_request_queue(self.policy)
            for request in every:
                name = request.request_id
                wait = controller.regulates(name) and name not in plan.ends and name not in plan.rows
                paused.append(request) if wait else self.waiting.add_request(request)
        output = super().schedule(*given, **named)
        for request in paused:
            self.waiting.add_request(request)
        self._output = output
        if self._log is not None and not output.total_num_scheduled_tokens:
            self._settle()
            self._log.flush()  # nothing to do: it may be long until the next line
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        self._settle()  # the workers compute meanwhile
        return super().get_grammar_bitmask(scheduler_output)

    def _later(self, note: Callable[..., object]) -> Callable[..., None]:
        """``note``, called by `_settle`: it costs a step nothing then."""
        return lambda *values, **fields: self._notes.append(partial(note, *values, **fields))

    def _settle(self) -> None:
        """Tell the policies what is computed in the step, and note what happened."""
        output, self._output = self._output, None
        if output is not None:
            self._controller.scheduled(output.num_scheduled_tokens, self._reached)
        notes, self._notes = self._notes, []
        for note in notes:
            note()

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, local: int = 0, external: int = 0
    ) -> int:
        """How many of ``num_new_tokens`` are computed in this step (0: none)."""
        if self._aligned:
            num_new_tokens = super()._mamba_block_aligned_split(request, num_new_tokens, local, external)
        if not self._controller.regulates(request.request_id):
            return num_new_tokens
        start = request.num_computed_tokens + local + external
        return limit_tokens(self._plan, request.request_id, start, num_new_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._settle()  # where vLLM had no need of the grammars
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.is_finished():
                self._controller.finish(name)
        self._steps += 1
        for request in self._refused:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request.request_id, [], finish_reason=request.get_finished_reason(), stop_reason=REASON,
                    events=request.take_events(), trace_headers=request.trace_headers,
                )
            )  # fmt: skip
        self._refused = []
        return outputs

    def _reached(self, name: str) -> int | None:
        request = self.requests.get(name)
        return request.num_computed_tokens if request is not None else None

    def _cached(self, name: str) -> tuple[int, Depths]:
        """How much of a prompt vLLM's cache has, and where its prefill stops: vLLM keeps the states of a
        hybrid model where a chunk ends."""
        request, unit = self.requests[name], self.block_size
        _, depth, shared = self.kv_cache_manager.get_computed_blocks(request)
        if not self._rules:
            return depth, ()
        observation, keep = choose_depths(self._rules, unit, request.num_prompt_tokens, depth, shared)
        if self._note_decision is not None:
            self._note_decision("serving.prefixcache", self._rules, observation, keep)
        return depth, tuple(unit * place for place in keep.depths)

    def shutdown(self) -> None:
        super().shutdown()
        self._settle()
        if self._log is not None:
            self._log.close()
        if self._run is not None:
            self._run.finish({"steps": self._steps})
            self._run = None
