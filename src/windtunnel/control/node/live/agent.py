"""An agent as two processes: one learns, one acts, and between them lies a slot with the newest prediction.

The slot is a file that both map, with two places. The writer fills the older one, its checksum last; the
reader takes the newer one, whole or not at all. No lock: neither process ever waits for the other.

On each failure:
- the model's process is killed, stopped or late: its prediction expires; the actuator takes the default.
- the actuator's process ends, also because its parent is gone: it cleans up. Killed or stopped by force it
  cannot: what it did last stays until somebody cleans up from outside (`windtunnel control node clean`).
- the slot is damaged (a flipped bit, a writer killed half-way): there is no prediction.

Times are of CLOCK_MONOTONIC, which is the same for all processes of a host.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.base.errors import HostError, UserError, WindtunnelError
from windtunnel.control.node.agents import (
    Actuator,
    ActuatorLoop,
    Ask,
    Effect,
    ModelLoop,
    NodeModel,
    Prediction,
)
from windtunnel.control.node.policy import POLICIES, Guards, Observation, Schedule
from windtunnel.store.eventlog import EventLog

USUAL, ALL = Schedule(), Guards()
BOUND, PLACE = 5.0, 1 << 20  # seconds in which a process ends or is killed; bytes of a place in a slot
_SUM, _HEAD = struct.Struct("<I"), struct.Struct("<QdQ")


class AgentSlot:
    """The slot at ``path``, made where there is none."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(2 * PLACE)
            self._map = mmap.mmap(file.fileno(), 2 * PLACE)

    def write(self, prediction: Prediction) -> None:
        """Raises UserError where the value is larger than a place."""
        value, start = json.dumps(prediction.value).encode(), prediction.sequence % 2 * PLACE
        if len(value) > PLACE - 32:
            raise UserError(f"`predict` gave {len(value)} bytes of JSON; accepted are {PLACE - 32}")
        body = _HEAD.pack(prediction.sequence, prediction.expires, len(value)) + value
        self._map[start + 4 : start + 4 + len(body)] = body
        self._map[start : start + 4] = _SUM.pack(zlib.crc32(body))

    def read(self) -> Prediction | None:
        """The newest one, None where there is none or it is damaged."""
        start = max((0, PLACE), key=lambda place: _HEAD.unpack_from(self._map, place + 4))
        sequence, expires, length = _HEAD.unpack_from(self._map, start + 4)
        body = self._map[start + 4 : start + 4 + _HEAD.size + min(length, PLACE)]
        if not sequence or zlib.crc32(body) != _SUM.unpack_from(self._map, start)[0]:
            return None
        return Prediction(sequence, expires, json.loads(body[_HEAD.size :]))


class RunningAgent(NamedTuple):
    """A running agent: its processes, and the file of its slot."""

    model: BaseProcess
    actuator: BaseProcess
    slot: Path


@contextlib.contextmanager
def run(
    model: NodeModel, actuator: Actuator, schedule: Schedule = USUAL, guards: Guards = ALL, *, log: Path
) -> Iterator[RunningAgent]:  # fmt: skip
    """An agent on this host until the block ends. Both objects go to processes of their own (pickled).
    ``log``: where decisions are written, for ``windtunnel replay``.

    Raises:
        HostError: the actuator had to be killed, or failed: it may not have cleaned up.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="windtunnel-node-", dir="/dev/shm") as folder:
        shared = (schedule, guards, slot := Path(folder) / "slot", log, os.getpid())
        processes = [
            context.Process(target=each, args=(part, *shared), daemon=True)
            for each, part in ((_learn, model), (_act, actuator))
        ]
        for process in processes:
            process.start()
        try:
            yield RunningAgent(processes[0], processes[1], slot)
        finally:
            for process in processes:  # the actuator last: it cleans up
                process.terminate()
                process.join(BOUND)
                process.kill()
                process.join()
        if status := processes[1].exitcode:
            raise HostError(f"the actuator ended with status {status}: windtunnel control node clean")


def _learn(model: NodeModel, schedule: Schedule, guards: Guards, slot: Path, path: Path, parent: int) -> None:
    log = EventLog(path, who="model")
    ask, effect = _logged(log)
    loop = ModelLoop(model, schedule, guards, ask, AgentSlot(slot).write, time.monotonic(), effect)
    _repeat(loop.turn, schedule.collect, parent)
    log.append("counts", counts=dict(loop.counts))


def _act(actuator: Actuator, schedule: Schedule, guards: Guards, slot: Path, path: Path, parent: int) -> None:
    log, place = EventLog(path, who="actuator"), AgentSlot(slot)
    loop = ActuatorLoop(actuator, schedule, guards, *_logged(log))
    try:
        _repeat(lambda now: loop.turn(now, place.read()), schedule.act, parent)
    finally:
        actuator.clean_up()
        shutil.rmtree(slot.parent, ignore_errors=True)  # a parent that was killed cannot
        log.append("counts", counts=dict(loop.counts))


def _logged(log: EventLog) -> tuple[Ask, Effect]:
    def ask(observation: Observation) -> Any:
        decision = POLICIES["guarded"](observation)
        log.decision("control.node", "guarded", observation, decision)
        return decision

    def effect(kind: str, sequence: int, value: Any, result: Any) -> None:
        log.append("effect", did=kind, sequence=sequence, value=value, **result)

    return ask, effect


def _repeat(turn: Callable[[float], None], period: float, parent: int) -> None:
    """A turn each period, until this process is told to end or its parent is gone."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    due = time.monotonic()
    while not stop.is_set() and os.getppid() == parent:
        try:
            turn(time.monotonic())
        except WindtunnelError as error:
            raise SystemExit(f"windtunnel: {error}") from None
        due = max(due + period, time.monotonic())  # turns that were missed are not made up for
        stop.wait(due - time.monotonic())
