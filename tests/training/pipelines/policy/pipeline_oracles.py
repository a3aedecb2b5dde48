"""Slow, plain ways to what the policies of pipelines decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

from windtunnel.training.pipelines.model import LayerProfile, Layout, Stage, Template, TemplateSet
from windtunnel.training.pipelines.policy.planner import iteration_time, one_forward_one_backward


def layers(times: Sequence[float], state: float = 0.0, activation: float = 0.0) -> list[LayerProfile]:
    """Layers that take ``times`` for forward and backward, with equal bytes."""
    return [LayerProfile(f"layer{i}", t / 4, 3 * t / 4, state, activation) for i, t in enumerate(times)]


def brute_force(profile: Sequence[LayerProfile], hosts: int, memory: float) -> float | None:
    """The least seconds of any plan that fits."""
    rounds, best = 4 * hosts, None
    for inner in combinations(range(1, len(profile)), hosts - 1):
        cuts = (0, *inner, len(profile))
        parts = [profile[first:last] for first, last in pairwise(cuts)]
        if all(_held(part, hosts - s) <= memory for s, part in enumerate(parts)):
            time = iteration_time([sum(p.forward + p.backward for p in part) for part in parts], rounds)
            best = time if best is None else min(best, time)
    return best


def check_template(template: Template, profile: Sequence[LayerProfile], memory: float) -> None:
    """It covers all layers in order, and each stage fits."""
    stages = template.stages
    assert [s.first for s in stages] == [0, *(s.last for s in stages[:-1])]
    assert stages[-1].last == len(profile)
    for s, stage in enumerate(stages):
        part = profile[stage.first : stage.last]
        assert part and _held(part, len(stages) - s) <= memory


def _held(part: Sequence[LayerProfile], flying: int) -> float:
    return sum(p.state_bytes + flying * p.activation_bytes for p in part)


def even_set(n0: int, count: int, failures: int, layers: int = 12) -> TemplateSet:
    """Templates that cut ``layers`` equal layers of a second as evenly as can be."""
    templates = []
    for hosts in range(n0, n0 + count):
        cuts = [layers * s // hosts for s in range(hosts + 1)]
        stages = tuple(Stage(u, v, float(v - u)) for u, v in pairwise(cuts))
        time = iteration_time([s.time for s in stages], 4 * hosts)
        templates.append(Template(stages, time))
    return TemplateSet(n0, failures, tuple(templates))


def sums(hosts: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All multisets of ``sizes`` (ascending) that sum to ``hosts``."""
    if hosts == 0:
        yield ()
    for i, size in enumerate(sizes):
        if size <= hosts:
            for rest in sums(hosts - size, sizes[i:]):
                yield (size, *rest)


def shares(count: int, total: int) -> Iterator[tuple[int, ...]]:
    """All ways to share ``total`` among ``count``, at least 1 each."""
    for each in product(range(1, total + 1), repeat=count - 1):
        if total - sum(each) >= 1:
            yield (*each, total - sum(each))


def held_by(set: TemplateSet, layout: Layout) -> dict[int, frozenset[int]]:
    """Layers of each host of a layout."""
    held: dict[int, frozenset[int]] = {}
    for pipeline in layout.pipelines:
        template = set.of(len(pipeline))
        for i, host in enumerate(pipeline):
            held[host] = frozenset(range(template.stages[i].first, template.stages[i].last))
    return held


def makespan(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """What the 1F1B schedule takes (seconds), with stages that take ``forward[s]`` and ``backward[s]``.

    Messages take no time.
    """
    stages = len(forward)
    plans = [one_forward_one_backward(s, stages, microbatches) for s in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * stages
    at = [0] * stages
    while any(at[s] < len(plans[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(plans[s]):
                kind, m = plans[s][at[s]].kind, plans[s][at[s]].microbatch
                ahead = kind == "forward"
                before = (kind, s - 1 if ahead else s + 1, m)
                if 0 <= before[1] < stages and before not in done:
                    break
                start = max(clocks[s], done.get(before, 0.0))
                clocks[s] = done[kind, s, m] = start + (forward[s] if ahead else backward[s])
                at[s] += 1
    return max(clocks)


def pipeline_time(times: Sequence[float], microbatches: int) -> float:
    """What microbatches are shared out by (seconds): forward and backward as one job that passes all
    stages."""
    slowest = max(times)
    return sum(times) - slowest + microbatches * slowest
