"""The comparison that the emulation of training is judged by: ``windtunnel bench training.emulate``.

Every figure is measured in this run or marked as published with its source; a target that is missed is shown
as missed, and a section that fails says why and does not lose the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module

from windtunnel.training.emulate.bench.rows import Row, all_rows

# Each section's module, imported when it runs: one does not pay for what another needs.
SECTIONS = {
    "time": "truth", "memory": "memory", "speed": "speed", "engine": "engine", "published": "published",
    "peers": "peers", "gpu": "gpu",
}  # fmt: skip


def run(
    sections: Sequence[str] = (),
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    shown: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """The rows of ``sections`` (default: all), in their order.

    ``quick``: fewer repeats and no large jobs. ``progress`` is called with the section that begins, ``shown``
    with the rows of each section once it is done.

    Raises:
        UserError: a section that there is not.
    """
    return all_rows({name: partial(_produce, name, quick) for name in SECTIONS}, sections, progress, shown)


def _produce(name: str, quick: bool) -> Iterator[Row]:
    yield from getattr(import_module(f"{__name__}.{SECTIONS[name]}"), f"{name}_rows")(quick)
