"""The comparison that pipeline templates are judged by: ``windtunnel bench training.pipelines``.

Live sections run the same job in the same harness under every way to go on. Published figures are Oobleck's
(Jang et al., SOSP 2023) and its artifact's; what is emulated says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module

from windtunnel.bench.rows import Row, all_rows

# Each section's module, imported when it runs: one does not pay for what another needs.
SECTIONS = {
    "planner": "planner", "recovery": "recovery", "rates": "recovery", "published": "replay", "twin": "twin",
    "fidelity": "fidelity",
}  # fmt: skip


def run(
    sections: Sequence[str] = (),
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    shown: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """The rows of ``sections`` (default: all), in their order.

    ``quick``: fewer repeats and losses. ``progress`` is called with the section that begins, ``shown`` with
    the rows of each section once it is done.

    Raises:
        UserError: a section that there is not.
    """
    return all_rows({name: partial(_produce, name, quick) for name in SECTIONS}, sections, progress, shown)


def _produce(name: str, quick: bool) -> Iterator[Row]:
    yield from getattr(import_module(f"{__name__}.{SECTIONS[name]}"), f"{name}_rows")(quick)
