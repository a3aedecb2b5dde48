"""What if the network were another one: one emulation of a job, replayed with other costs, kept as a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.linux import network
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store
from windtunnel.training.bottleneck import twin
from windtunnel.training.bottleneck.measure import LivePoint, compare
from windtunnel.training.bottleneck.policy import TARGET, Decision, Observation, decide
from windtunnel.training.bottleneck.twin import Workload, netai20, published
from windtunnel.training.emulate.emulation import (
    EmulationChanges,
    EmulationResult,
    recosted,
    retimed,
    simulate,
)
from windtunnel.training.emulate.gradients import backward_of
from windtunnel.training.emulate.graph import DTYPE_BYTES
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.run import program_of

CAPABILITY = "training.bottleneck"
GBIT = 1e9 / 8
LIVE_RATES = tuple(value * GBIT for value in (0.1, 0.25, 0.5, 1))
BANDWIDTHS = tuple(value * GBIT for value in (1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400, 800))
RATIOS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
COMPUTE = (2.0, 4.0, 8.0)
TRANSPORT_CAP = 25 * GBIT
"""What NCCL over TCP reached on links of 40 and 100 Gb/s in 2019 (Zhang et al., section 2)."""
PASSES = 4.0
"""Over memory: encoding and decoding read and write all that is summed once each, which is the least."""
ENDLESS, CRAWL = 1e18, 1e3
"""Bytes/s."""
CLOSE = 0.05
"""To this fraction is the bandwidth known that a target needs."""
Progress = Callable[[str, float], None]
Need = tuple[float | None, float | None]


@dataclass(frozen=True)
class WhatIfPoint:
    """One what-if. ``what``: of *as it is*, *full use*, *bandwidth*, *compression*, *compression, with its
    cost*, *compute*, *capped transport*, *hosts*; ``value``: bytes/s, a ratio, a factor, or hosts.
    ``iteration``: emulated seconds; ``scaling``: of one device's own time over that, 0 to 1; ``used``: of
    what the NICs could carry, 0 to 1."""

    what: str
    value: float
    iteration: float
    scaling: float
    used: float


@dataclass
class Analysis:
    """``needs``: the bandwidth of a NIC and the ratio of a free compression for each target, None where
    neither helps. All of it is emulated, but for ``live``."""

    run: str
    cluster: str
    points: list[WhatIfPoint]
    verdict: Decision
    needs: dict[str, Need] = field(default_factory=dict)
    live: list[LivePoint] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain | {"sentence": self.sentence(), "source": "emulated"}

    def sentence(self) -> str:
        """The verdict in words."""
        verdict, (now, *_) = self.verdict, self.points
        text = f"the network is {'' if verdict.network else 'not '}the bottleneck: {verdict.reason}"
        if not verdict.network or verdict.bandwidth is None:
            return text
        lifted = next(point for point in self.points if point.value == verdict.bandwidth)
        return (
            f"{text}; a NIC of {gigabits(verdict.bandwidth)} would give {lifted.scaling:.1%}, "
            f"{now.iteration / lifted.iteration:.2f} times the speed"
        )


def gigabits(bandwidth: float) -> str:
    """Bytes/s as links are sold."""
    return f"{bandwidth / GBIT:.3g} Gb/s"


def analyse(
    program: Any, arguments: Sequence[str] = (), *, cluster: str, hosts: Sequence[int] = (),
    live: Sequence[int] = (), live_rates: Sequence[float] = LIVE_RATES, progress: Progress = lambda *_: None,
) -> Analysis:  # fmt: skip
    """Emulate ``program`` (a script's path, or a function) on ``cluster`` (its file, or a name), and replay
    it on other networks. ``hosts``: other numbers of hosts, each emulated by itself. ``live``: numbers of
    ranks with which it runs on this machine for real, over links of each of ``live_rates`` in bytes/s.

    Raises:
        UserError: program or cluster is wrong, the job does not leave one host, or it cannot run here.
        ScriptError: the program failed.
    """
    script, where = program_of(program, arguments), load_cluster(cluster)
    script.check()
    if live and (why := network.missing()):
        raise UserError(f"`live`: {why}")
    if where.hosts == 1:
        raise UserError(f"`cluster` {cluster}: no network is used by one host; two or more are accepted")
    inputs = {"script": script.name, "args": [*arguments], "cluster": where.name, "hosts": [*hosts]}
    if live:
        inputs |= {"live": [*live], "live_rates": [*live_rates]}
    run = Store.open().begin(CAPABILITY, inputs, 0)
    with run.failing(), closing(EventLog(run.directory / NAME)) as log:
        result = simulate(script, where, Options(), progress)
        points, needs, observation = weigh(result)
        for count in hosts:
            other = simulate(script, replace(where, hosts=count), Options(), progress)
            points.append(_point("hosts", count, other, EmulationChanges(other.cluster), _alone(other)))
        verdict = decide(observation)
        log.decision(CAPABILITY, "bottleneck", observation, verdict)
        analysis = Analysis(run.id, where.name, points, verdict, needs)
        for measured in compare(script, live, live_rates, progress) if live else ():
            log.append("live", **to_plain(measured))
            analysis.live.append(measured)
        now = points[0]
        run.finish(
            {"verdict": analysis.sentence(), "iteration_time_s": now.iteration, "scaling": now.scaling}
        )
    return analysis


def weigh(result: EmulationResult) -> tuple[list[WhatIfPoint], dict[str, Need], Observation]:
    """All what-ifs of an emulated job, the first of them as it is; what each target needs; and what is to be
    decided for `TARGET`."""
    points, nic = _points(result), result.cluster.host.nic
    endless = retimed(result, EmulationChanges(_with(result.cluster, bandwidth=ENDLESS)))
    most = _alone(result) / endless.iteration_time_s
    needs: dict[str, Need] = {}
    for target in (0.99, TARGET):
        observation = Observation(
            nic.bandwidth, points[0].scaling, most, _curve(points, "bandwidth"),
            _curve(points, "compression"), target,
        )  # fmt: skip
        if decide(observation).bandwidth is not None:
            points += _closer(result, observation.by_bandwidth, target)
            observation = replace(observation, by_bandwidth=_curve(points, "bandwidth"))
        verdict = decide(observation)
        needs[f"{target:g}"] = verdict.bandwidth, verdict.compression
    return points, needs, observation


def paper_rows(
    program: Any | None, arguments: Sequence[str] = (), cluster: str | None = None, *,
    progress: Progress = lambda *_: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Scaling factors by the paper's rules, for each number of workers and Gb/s, and at 10 Gb/s for each
    ratio of compression: of its own models, or of ``program`` on the devices of ``cluster``."""
    workloads = published()
    if program is not None:
        assert cluster is not None
        script = program_of(program, arguments)
        script.check()
        workload = workload_of(simulate(script, load_cluster(cluster), Options(), progress))
        workloads = {workload.name: workload}
    return [
        {
            "model": name,
            "workers": workers,
            "scaling": {f"{rate / GBIT:g}": netai20(workload, workers, rate) for rate in twin.BANDWIDTHS},
            "compressed at 10 Gb/s": {
                f"{ratio}": netai20(workload, workers, 10 * GBIT, ratio) for ratio in twin.RATIOS
            },
        }
        for name, workload in workloads.items()
        for workers in twin.WORKERS
    ]


def workload_of(result: EmulationResult) -> Workload:
    """An emulated job as the paper's simulator takes it: when its backward makes which gradient.

    Raises:
        UserError: it makes none of its own (sharding).
    """
    backward = backward_of(result)
    gradients = tuple(
        (gradient.seconds, gradient.numel * DTYPE_BYTES[gradient.dtype]) for gradient in backward.gradients
    )
    batch = backward.before + sum(wait for wait, _ in gradients) + backward.after
    return Workload(result.program.name, batch, gradients)


def read_run(name: str) -> tuple[str, list[str], str]:
    """Script, arguments and cluster of an emulation in the store, by its id or ``last``.

    Raises:
        UserError: there is none.
    """
    store = Store.open()
    run = store.newest("training.emulate", lambda _: True) if name == "last" else store.get(name)
    if run is None or run.capability != "training.emulate":
        raise UserError(f"bottleneck {name}: no emulation in the store has that name; give one, or a script")
    return run.inputs["script"], run.inputs["args"], run.inputs["cluster"]


def _points(result: EmulationResult) -> list[WhatIfPoint]:
    cluster, nic, alone = result.cluster, result.cluster.host.nic, _alone(result)

    def point(what: str, value: float, **changes: Any) -> WhatIfPoint:
        own = _alone(result, changes["compute"]) if "compute" in changes else alone
        return _point(what, value, result, EmulationChanges(**{"cluster": cluster, **changes}), own)

    points = [
        _point("as it is", nic.bandwidth, result, EmulationChanges(cluster), alone),
        point("full use", nic.bandwidth, cluster=_with(cluster, efficiency=1.0)),
    ]
    points += [point("bandwidth", value, cluster=_with(cluster, bandwidth=value)) for value in BANDWIDTHS]
    points += [point("compression", ratio, ratio=ratio) for ratio in RATIOS]
    points += [point("compression, with its cost", ratio, ratio=ratio, passes=PASSES) for ratio in RATIOS[1:]]
    points += [point("compute", factor, compute=factor) for factor in COMPUTE]
    capped = min(nic.bandwidth, TRANSPORT_CAP)
    return [*points, point("capped transport", capped, cluster=_with(cluster, bandwidth=capped))]


def _point(
    what: str, value: float, result: EmulationResult, changes: EmulationChanges, alone: float
) -> WhatIfPoint:
    nic = changes.cluster.host.nic
    timing = retimed(result, changes)
    # on a link that is slow enough all else that a collective takes is nothing: so its bytes are found
    slow = recosted(result, replace(changes, cluster=_with(changes.cluster, bandwidth=CRAWL)))
    sent = sum(
        use.count * slow.collective(use.call, use.group) * CRAWL * nic.efficiency
        for use in timing.collectives
        if len({changes.cluster.host_of(rank) for rank in use.group.ranks}) > 1
    )
    seconds = timing.iteration_time_s
    return WhatIfPoint(
        what, value, seconds, min(1.0, alone / seconds), min(1.0, sent / nic.bandwidth / seconds)
    )


def _closer(
    result: EmulationResult, curve: tuple[tuple[float, float], ...], target: float
) -> list[WhatIfPoint]:
    """Bandwidths between the last that is too little and the first that is enough."""
    low = max((value for value, scaling in curve if scaling < target), default=None)
    high = min(value for value, scaling in curve if scaling >= target)
    points, alone = list[WhatIfPoint](), _alone(result)
    while low is not None and high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        changes = EmulationChanges(_with(result.cluster, bandwidth=middle))
        points.append(_point("bandwidth", middle, result, changes, alone))
        low, high = (low, middle) if points[-1].scaling >= target else (middle, high)
    return points


def _curve(points: Sequence[WhatIfPoint], what: str) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((point.value, point.scaling) for point in points if point.what == what))


def _alone(result: EmulationResult, compute: float = 1.0) -> float:
    """Seconds of an iteration in which no collective takes any time."""
    changes = EmulationChanges(result.cluster, instant=True, compute=compute)
    return retimed(result, changes).iteration_time_s


def _with(cluster: Cluster, **nic: Any) -> Cluster:
    return replace(cluster, host=replace(cluster.host, nic=replace(cluster.host.nic, **nic)))
