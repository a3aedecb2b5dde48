"""The command line: one module a verb, each of which parses, calls and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """A function to call with what is being done and the fraction of it that is done: a bar on a terminal, on
    standard error, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)

        def tell(what: str, fraction: float) -> None:
            bar.update(task, description=f"{title}: {what}", completed=fraction)

        yield tell
