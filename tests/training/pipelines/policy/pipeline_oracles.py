"""Slow, plain ways to what the policies of pipelines decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

from windtunnel.training.pipelines.model import LayerProfile, Layout, Stage, Template, TemplateSet
from windtunnel.training.pipelines.policy.times import iteration_time


def layers(times: Sequence[float], state: float = 0.0, activation: float = 0.0) -> list[LayerProfile]:
    """Layers that take ``times`` for forward and backward, with equal bytes."""
    return [LayerProfile(f"layer{i}", t / 4, 3 * t / 4, state, activation) for i, t in enumerate(times)]


def divisions(devices: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """All sequences of stages' devices (powers of two) that fill machine after machine."""
    if devices == 0:
        yield ()
        return
    room = (devices - 1) % per_node + 1
    d = 1
    while d <= room:
        for rest in divisions(devices - d, per_node):
            yield (d, *rest)
        d *= 2


def plans(
    profile: Sequence[LayerProfile], nodes: int, per_node: int, memory: float, microbatches: int | None
) -> Iterator[tuple[float, int, tuple[int, ...], tuple[int, ...]]]:
    """Every plan that fits: (seconds, microbatches, cuts, devices)."""
    count = len(profile)
    for devices in divisions(nodes * per_node, per_node):
        stages = len(devices)
        rounds = 4 * stages if microbatches is None else microbatches
        if stages > max(nodes, rounds // 2):
            continue
        for inner in combinations(range(1, count), stages - 1) if stages <= count else ():
            cuts = (0, *inner, count)
            times = []
            for s, d in enumerate(devices):
                part = profile[cuts[s] : cuts[s + 1]]
                held = min(stages - s, rounds)
                if sum(p.state_bytes + held * p.activation_bytes for p in part) > memory * d:
                    break
                inside = sum(dict(p.in_node)[d] for p in part) if d > 1 else 0.0
                times.append(sum(p.forward + p.backward for p in part) / d + 2 * inside)
            else:
                yield iteration_time(times, rounds), rounds, cuts, devices


def brute_force(
    profile: Sequence[LayerProfile], nodes: int, per_node: int, memory: float, microbatches: int | None
) -> float | None:
    """The least seconds a microbatch of any plan."""
    return min((t / n for t, n, _, _ in plans(profile, nodes, per_node, memory, microbatches)), default=None)


def check_template(template: Template, profile: Sequence[LayerProfile], per_node: int, memory: float) -> None:
    """It covers all layers and devices in order, and each stage fits."""
    stages = template.stages
    assert [s.first for s in stages] == [0, *(s.last for s in stages[:-1])]
    assert stages[-1].last == len(profile)
    assert all(s.last > s.first for s in stages)
    assert list(template.nodes_of_stage) == sorted(template.nodes_of_stage)
    used = [0] * template.nodes
    for s, (stage, node) in enumerate(zip(stages, template.nodes_of_stage, strict=True)):
        used[node] += stage.devices
        held = min(len(stages) - s, template.microbatches)
        part = profile[stage.first : stage.last]
        need = sum(p.state_bytes + held * p.activation_bytes for p in part)
        assert need <= memory * stage.devices
    assert used == [per_node] * template.nodes


def even_set(n0: int, count: int, failures: int, layers: int = 12) -> TemplateSet:
    """Templates that cut ``layers`` equal layers of a second as evenly as can be."""
    made = []
    for nodes in range(n0, n0 + count):
        cuts = [layers * s // nodes for s in range(nodes + 1)]
        stages = tuple(Stage(u, v, 1, float(v - u)) for u, v in pairwise(cuts))
        time = iteration_time([s.time for s in stages], 4 * nodes)
        made.append(Template(nodes, stages, tuple(range(nodes)), time, 4 * nodes))
    return TemplateSet(n0, failures, tuple(made), "even")


def sums(nodes: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All multisets of ``sizes`` (ascending) that sum to ``nodes``."""
    if nodes == 0:
        yield ()
    for i, size in enumerate(sizes):
        if size <= nodes:
            for rest in sums(nodes - size, sizes[i:]):
                yield (size, *rest)


def shares(count: int, total: int) -> Iterator[tuple[int, ...]]:
    """All ways to share ``total`` among ``count``, at least 1 each."""
    for each in product(range(1, total + 1), repeat=count - 1):
        if total - sum(each) >= 1:
            yield (*each, total - sum(each))


def held_by(set: TemplateSet, layout: Layout) -> dict[int, frozenset[int]]:
    """Layers of each machine of a layout."""
    held: dict[int, frozenset[int]] = {}
    for pipeline in layout.pipelines:
        template = set.of(len(pipeline))
        for i, node in enumerate(pipeline):
            held[node] = frozenset(
                layer
                for stage, where in zip(template.stages, template.nodes_of_stage, strict=True)
                if where == i
                for layer in range(stage.first, stage.last)
            )
    return held
