"""Who does what in one generation: pipelines, stages, microbatches and groups, by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.live.reduce import Holders, make_groups
from windtunnel.training.pipelines.model import Layout, Template, TemplateSet
from windtunnel.training.pipelines.policy.transfers import layers_by_host


@dataclass(frozen=True)
class Team:
    """The part of one rank. ``pipeline`` and ``stage`` are None for a host that is in no pipeline.

    ``layers``: indices of the layers here, ascending. ``microbatches``: this pipeline's, numbered within the
    step. ``before``, ``after``: neighbours' ranks. ``holders``: of each layer of the model.
    """

    rank: int
    world: int
    layout: Layout
    pipeline: int | None
    stage: int | None
    layers: tuple[int, ...]
    microbatches: range
    before: int | None
    after: int | None
    holders: Mapping[int, Holders]


def assigned(set: TemplateSet, layout: Layout, ranks: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """The layers of each rank that is in a pipeline, ascending. ``ranks``: by host.

    Raises:
        UserError: a template gives a host several devices, or layers that do not follow each other.
    """
    found: dict[int, tuple[int, ...]] = {}
    for pipeline in layout.pipelines:
        template = set.of(len(pipeline))
        for host, layers in zip(pipeline, _contiguous(template), strict=True):
            found[ranks[host]] = layers
    return found


def make_team(set: TemplateSet, layout: Layout, ranks: Mapping[int, int], rank: int) -> Team:
    """The team of ``rank``, with its groups. Called by all ranks at the same time, with the same layout."""
    layers = assigned(set, layout, ranks)
    lines = [tuple(ranks[host] for host in pipeline) for pipeline in layout.pipelines]
    shares: list[range] = []
    for count in layout.microbatches:
        begin = shares[-1].stop if shares else 0
        shares.append(range(begin, begin + count))
    count = max(layers[lines[0][-1]]) + 1
    # Holders of each layer, one of each pipeline, by rank; and what each of them works on.
    pairs = [
        sorted(
            (rank_, number) for number, line in enumerate(lines) for rank_ in line if index in layers[rank_]
        )
        for index in range(count)
    ]
    sets = [tuple(rank_ for rank_, _ in pair) for pair in pairs]
    groups = make_groups(sets, len(ranks))
    holders = {
        index: Holders(sets[index], tuple(shares[number] for _, number in pair), groups[sets[index]])
        for index, pair in enumerate(pairs)
    }
    mine = next(((p, line.index(rank)) for p, line in enumerate(lines) if rank in line), None)
    if mine is None:
        return Team(rank, len(ranks), layout, None, None, (), range(0), None, None, holders)
    number, stage = mine
    line = lines[number]
    return Team(
        rank,
        len(ranks),
        layout,
        number,
        stage,
        layers[rank],
        shares[number],
        line[stage - 1] if stage else None,
        line[stage + 1] if stage + 1 < len(line) else None,
        holders,
    )


def _contiguous(template: Template) -> list[tuple[int, ...]]:
    found = []
    for layers in layers_by_host(template):
        ordered = tuple(sorted(layers))
        if ordered != tuple(range(ordered[0], ordered[-1] + 1)):
            raise UserError(f"the template for {template.hosts} hosts gives one of them layers {ordered}")
        found.append(ordered)
    if any(stage.devices != 1 for stage in template.stages):
        raise UserError(
            f"the template for {template.hosts} hosts has stages of several devices; one rank a host"
            " works on one device: make templates with one device a host"
        )
    return found
