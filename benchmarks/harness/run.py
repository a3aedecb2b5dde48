"""Which sections there are, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row, guarded
from windtunnel.base.errors import UserError

BENCHES: Mapping[str, Mapping[str, str]] = {
    "agents.sandbox": {
        "latency": "freeze fork calls loaded", "recovery": "recovery bytes",
        "overhead": "overhead twin",
    },
    "control.database": {"": "decisions tasks twin"},
    "control.debug": {"": "overhead"},
    "control.node": {"": "faults harvest memory"},
    "data.embeddings": {
        "profile": "profile", "exchange": "flexshard exchange", "tiers": "tiers",
        "plans": "planners milp forecast",
    },
    "data.files": {"": "write cpu frozen"},
    "data.group": {"": "tail"},
    "data.ingest": {"rivals": "rows plain", "service": "stalls"},
    "edge.federated": {"": "bytes accuracy live"},
    "engines.flows": {"": "speed packets"},
    "engines.packets": {"": "speed"},
    "network.aggregation": {"": "twin live"},
    "network.dag": {"": "jct live"},
    "network.hostrate": {"": "twin kernel"},
    "network.mobilerate": {"": "near-stationary driving lossy live"},
    "network.multicast": {"": "twin live"},
    "network.sharing": {"shares": "twin kernel", "packet": "packet"},
    "network.torus": {"": "wavelengths planning failures alltoall"},
    "serving.branching": {"goodput": "goodput map", "live": "live"},
    "serving.engine": {"": "speed live"},
    "serving.prefixcache": {"rows": "agents chats mooncake"},
    "serving.variants": {"live": "live", "twin": "cost fixed"},
    "serving.vllm": {"rows": "speed objectives branches hybrid engine"},
    "silicon.mapper": {"": "allocation search"},
    "training.bottleneck": {"": "live"},
    "training.checkpoint": {"wasted": "wasted", "cost": "cost idle"},
    "training.elastic": {"": "loops"},
    "training.emulate": {"truth": "time memory gpu", "speed": "speed engine published"},
    "training.goodput": {"scale": "twin"},
    "training.gradsync": {
        "strategy": "strategy", "live": "live sparse",
        "codecs": "encode steps",
    },
    "training.hybrid": {"truth": "memory time scale"},
    "training.pipelines": {"planner": "planner", "recovery": "recovery rates"},
    "trust.gpu": {"slowdown": "paths training"},
    "trust.shield": {"": "memory handshake accelerators"},
}  # fmt: skip
"""Of capabilities and engines the sections in each of their modules: ``x-y`` is what ``x_y_rows`` yields."""


def sections_of(name: str) -> dict[str, Callable[[], Callable[..., Iterable[Row]]]]:
    """By section what imports its function: none pays for what another needs.

    Raises:
        UserError: there is no such benchmark.
    """
    if name not in BENCHES:
        raise UserError(f"benchmarks: {name!r} is unknown; accepted are {', '.join(BENCHES)}")

    def load(module: str, section: str) -> Callable[..., Iterable[Row]]:
        place = import_module(f"benchmarks.{name}.{module}".rstrip("."))
        rows: Callable[..., Iterable[Row]] = getattr(place, f"{section.replace('-', '_')}_rows")
        return rows

    return {
        section: partial(load, module, section)
        for module, sections in BENCHES[name].items()
        for section in sections.split()
    }


def run(
    name: str,
    only: Sequence[str] = (),
    *,
    quick: bool = False,
    trace: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
    section_done: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """The rows of the sections ``only`` (default: all), in the order of the table.

    ``quick``: fewer repeats, and nothing that is large. ``trace``: a file for the sections that hold a
    published trace against policies. ``progress`` is called with the section that begins, and the part of
    them that is done; ``section_done`` with the rows of each section once it is done.

    Raises:
        UserError: a benchmark or section that there is not, or a ``trace`` where none takes it.
    """
    sections = sections_of(name)
    for section in only:
        if section not in sections:
            raise UserError(f"--only {section!r} is no section; accepted are {', '.join(sections)}")
    chosen = [section for section in sections if not only or section in only]
    if trace is not None and not any(_takes_trace(sections[section]()) for section in chosen):
        able = [section for section, load in sections.items() if _takes_trace(load())]
        raise UserError(
            f"--trace {trace} is of no section that runs here; accepted with"
            f" {', '.join(able) or 'none of this bench'}"
        )

    def produce(section: str) -> Iterable[Row]:
        rows = sections[section]()
        return rows(quick, trace) if _takes_trace(rows) else rows(quick)

    rows: list[Row] = []
    for place, section in enumerate(chosen):
        if progress is not None:
            progress(section, place / len(chosen))
        done = guarded(section, partial(produce, section))
        if section_done is not None:
            section_done(done)
        rows += done
    return rows


def _takes_trace(rows: Callable[..., Any]) -> bool:
    return "trace" in signature(rows).parameters
