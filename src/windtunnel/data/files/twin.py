"""The pipeline of a primary and the chain behind it, emulated: stages on cores, chunks in bounded queues,
disks.

What a byte costs at each stage is told by a profile: of this computer as measured (`Status.seconds`), or of
other hardware. The stages, the depth of the queues, the size of a chunk and every rule (`policy.decide`) are
those of live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simpy import Store

from windtunnel.data.files.model import CHUNK, Mode
from windtunnel.data.files.policy import ChainChange, ChainView, Decision, Observation, PipelineLoad, decide
from windtunnel.engines.events import Environment, Event, ProcessGenerator, SharedResource

DEPTH = 4


@dataclass(frozen=True)
class PipelineProfile:
    """``stages``: CPU seconds a byte of each stage, and of "write": what the writer and its server take.
    ``packed``: bytes that travel, of each of the log. ``link``: bytes/s of the chain. ``flush``: seconds of
    bringing the log to a disk, ``disk``: bytes/s of it. ``host_cores``, ``nic_cores``: CPU seconds a
    second."""

    stages: Mapping[str, float]
    packed: float = 1.0
    link: float = 3e9
    flush: float = 5e-3
    disk: float = 1e9
    host_cores: float = 1.0
    nic_cores: float = 1.0


@dataclass
class PipelineResult:
    """``seconds`` until the last of ``nbytes`` is on all disks. CPU seconds of the hosts' applications' cores
    and of those that are set aside."""

    nbytes: float
    seconds: float = 0.0
    host_cpu: float = 0.0
    nic_cpu: float = 0.0
    decisions: list[Decision] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.nbytes / self.seconds


def emulate(profile: PipelineProfile, mode: Mode, nbytes: float, replicas: int = 3) -> PipelineResult:
    """Write so many bytes as fast as they are taken, then fsync."""
    env, result = Environment(), PipelineResult(nbytes)
    flow = decide(PipelineLoad(mode, (0,)))
    host = SharedResource(env, profile.host_cores, 1.0)
    nic = SharedResource(env, profile.nic_cores, 1.0) if flow.cores else host
    link = SharedResource(env, profile.link, profile.link)
    log, publish, send, sent = (Store(env, DEPTH) for _ in range(4))
    chunks = [min(CHUNK, nbytes - at) for at in range(0, int(nbytes), CHUNK)]
    width = flow.width
    acknowledged: list[Event] = []

    def cost(stage: str, size: float) -> float:
        return size * profile.stages.get(stage, 0.0)

    def writing() -> ProcessGenerator:
        for size in chunks:
            yield host.use(cost("write", size))
            yield log.put(size)

    def take(size: float) -> ProcessGenerator:
        yield nic.use(cost("fetch", size) + cost("validate", size))

    def publishing(size: float) -> ProcessGenerator:
        yield nic.use(cost("publish", size))
        yield env.timeout(size / profile.disk)

    def transfer(size: float) -> ProcessGenerator:
        yield nic.use(cost("transfer", size))
        for _ in range(replicas - 1):  # hop by hop; what one hop has may go on before the next chunk is there
            yield link.use(size * profile.packed)

    def in_turn() -> ProcessGenerator:
        for _ in chunks:
            size = yield log.get()
            yield from take(size)
            yield from publishing(size)
            yield nic.use(cost("compress", size))
            yield from transfer(size)

    def fetching() -> ProcessGenerator:
        nonlocal width
        for _ in chunks:
            size = yield log.get()
            yield from take(size)
            packed = env.process(compressing(size))
            yield send.put((size, packed))
            yield publish.put(size)
            pipeline = PipelineLoad(mode, (0,), len(send.items) / DEPTH, width)
            flow = decide(pipeline)
            if flow.width != width:
                result.decisions.append(flow)
                width = flow.width

    def compressing(size: float) -> ProcessGenerator:
        yield nic.use(cost("compress", size))

    def all_published() -> ProcessGenerator:
        for _ in chunks:
            size = yield publish.get()
            yield from publishing(size)

    def sending() -> ProcessGenerator:
        for _ in chunks:
            size, packed = yield send.get()
            yield packed
            yield sent.put(env.process(transfer(size)))

    def acknowledging() -> ProcessGenerator:
        for _ in chunks:
            yield (yield sent.get())

    env.process(writing())
    works = (fetching, all_published, sending, acknowledging) if flow.pipelined else (in_turn,)
    acknowledged = [env.process(work()) for work in works]
    for event in acknowledged:
        env.run(event)
    result.seconds = env.now + profile.flush + cost("acknowledge", nbytes)
    for shared in {host, nic}:
        shared.advance()
    result.host_cpu, result.nic_cpu = host.served, nic.served if nic is not host else 0.0
    return result


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision means: threads that compress and writers that wait, or an epoch and its hosts."""
    if isinstance(decision, ChainChange):
        assert isinstance(observation, ChainView)
        return {
            "epochs": float(decision.act == "change"),
            "hosts left out": float(len(observation.chain) - len(decision.chain)),
        }
    return {"threads": float(decision.width), "waits": float(decision.wait)}
