"""The comparison that sandboxes are judged by: ``windtunnel bench agents.sandbox``.

All policies run side by side on the same sessions in one run: what the policy decides (semantic), everything
every turn (full), files every turn, and nothing but the conversation. Published figures are those of Crab
(arXiv 2604.28138). Whatever a section makes lies in a home folder of its own and is removed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module

from windtunnel.bench.rows import Row, all_rows, left_out

# Each section's module and function, imported when it runs.
# the times of single operations first: what the long sections leave to be written would slow them
SECTIONS = {
    "freeze": "latency", "fork": "latency", "peer": "peer", "recovery": "recovery", "false-none": "classes",
    "bytes": "volume", "shares": "volume", "overhead": "overhead", "twin": "twin",
}  # fmt: skip


def run(
    sections: Sequence[str] = (),
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    shown: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """The rows of ``sections`` (default: all), in their order.

    ``quick``: fewer kills and repeats, shorter think times. ``progress`` is called with the section that
    begins, ``shown`` with the rows of each section once it is done.

    Raises:
        UserError: a section that there is not.
    """
    return all_rows({name: partial(_produce, name, quick) for name in SECTIONS}, sections, progress, shown)


def _produce(name: str, quick: bool) -> Iterator[Row]:
    from windtunnel.agents.sandbox.bench.harness import missing

    if why := missing():
        yield left_out(name, name, why)
        return
    rows = getattr(import_module(f"{__name__}.{SECTIONS[name]}"), f"{name.replace('-', '_')}_rows")
    yield from rows(quick)
