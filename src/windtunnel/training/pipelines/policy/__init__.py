"""What pipelines on changing hosts ask: which layout follows, and what becomes of the step in doubt.

Observations hold all that the answer depends on; live writes them beside the answers to the run's events. How
templates are cut (`templates`), and in what order stages work (`planner`), is settled beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from windtunnel.training.pipelines.model import Layout, Reconfiguration, TemplateSet
from windtunnel.training.pipelines.policy.commit import Resolution, Standing, resolve
from windtunnel.training.pipelines.policy.compose import compose
from windtunnel.training.pipelines.policy.reconfigure import reconfigure

__all__ = ["POLICIES", "Decision", "HostsChanged", "InDoubt", "Observation", "decide"]


@dataclass(frozen=True)
class HostsChanged:
    """``present`` hosts (ids, in the order of their ranks) are to run what ran in the layout ``before``, None
    at the start. Further fields as in `reconfigure.reconfigure`."""

    templates: TemplateSet
    before: Layout | None
    present: tuple[int, ...]
    microbatches: int
    layer_bytes: tuple[float, ...]
    search: bool = True


@dataclass(frozen=True)
class InDoubt:
    """What all hosts said when they met, by rank, of a model of so many ``layers``."""

    standings: dict[int, Standing]
    layers: int


Observation = HostsChanged | InDoubt
Decision = Reconfiguration | Resolution


def decide(observation: Observation) -> Decision:
    """The layout and the copies that lead to it (an empty one where hosts are too few), or what to apply."""
    if isinstance(observation, InDoubt):
        return resolve(observation.standings, observation.layers)
    return after_change(observation)


def after_change(now: HostsChanged) -> Reconfiguration:
    """The layout after a change; see `decide`.

    Raises:
        UserError: there is no microbatch.
    """
    members = {host for pipeline in now.before.pipelines for host in pipeline} if now.before else set[int]()
    if now.before is None or members.isdisjoint(now.present):
        if len(now.present) < now.templates.n0:
            return Reconfiguration(Layout((), ()), "none")
        layout = compose(now.templates, now.present, now.microbatches)
        return Reconfiguration(layout, "compose")
    return reconfigure(
        now.templates,
        now.before,
        members.difference(now.present),
        [host for host in now.present if host not in members],
        microbatches=now.microbatches,
        layer_bytes=now.layer_bytes,
        search=now.search,
    )


def _searching(search: bool) -> Callable[[Observation], Decision]:
    def decided(observation: Observation) -> Decision:
        if isinstance(observation, HostsChanged):
            observation = replace(observation, search=search)
        return decide(observation)

    return decided


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "search": _searching(True),
    "local": _searching(False),
}
