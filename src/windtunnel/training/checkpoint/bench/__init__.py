"""The comparison that checkpoints in peers' memory are judged by: ``windtunnel bench training.checkpoint``.

Real jobs on emulated machines of this host, killed for real; every baseline runs in the same call. Published
figures are those of GEMINI (Wang et al., SOSP 2023). Whatever a section makes lies in a folder of its own,
and is removed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module

from windtunnel.bench.rows import Row, all_rows

SECTIONS = ("recovery", "wasted", "cost", "idle", "regroup", "placement")
"""Each one is the module of its name, imported when it runs."""


def run(
    sections: Sequence[str] = (),
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    shown: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """The rows of ``sections`` (default: all), in their order.

    ``quick``: fewer kills and repeats, smaller states. ``progress`` is called with the section that begins,
    ``shown`` with the rows of each section once it is done.

    Raises:
        UserError: a section that there is not.
    """
    return all_rows({name: partial(_produce, name, quick) for name in SECTIONS}, sections, progress, shown)


def _produce(name: str, quick: bool) -> Iterator[Row]:
    yield from getattr(import_module(f"{__name__}.{name}"), f"{name}_rows")(quick)
