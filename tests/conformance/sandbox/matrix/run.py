"""The whole matrix: which rows can be here, the image that holds their programs, two rows at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError

from benchmarks.agents.sandbox.harness import open_host, own_home
from benchmarks.harness.measure import side_by_side
from benchmarks.harness.rows import Row, figure
from conformance.sandbox.matrix import outside
from conformance.sandbox.matrix.arena import Arena, ByCommand, OfHost
from conformance.sandbox.matrix.features import FEATURES
from conformance.sandbox.matrix.judge import judged
from conformance.sandbox.matrix.languages import LANGUAGES
from conformance.sandbox.matrix.row import MatrixRow, Outcome, Verdict, folders
from conformance.sandbox.matrix.servers import SERVERS
from conformance.sandbox.matrix.tools import TOOLS
from windtunnel.agents.sandbox.files import host_image
from windtunnel.base.errors import UserError

ROWS = (*TOOLS, *LANGUAGES, *SERVERS, *FEATURES)
QUICK = 8
"""Rows of each kind that a quick run has."""


def matrix_rows(quick: bool) -> Iterator[Row]:
    """The rows of the bench: of each kind how many are as promised, and what is not, by name."""
    chosen = [row for kind in ("program", "feature") for row in [r for r in ROWS if r.kind == kind][:QUICK]]
    outcomes = outcomes_of(chosen if quick else ROWS)
    for kind, words in (("program", "foreign programs"), ("feature", "features of the kernel")):
        yield counted(words, [outcome for outcome in outcomes if outcome.row.kind == kind])
    silent = [outcome for outcome in outcomes if outcome.verdict is Verdict.SILENT]
    note = "; ".join(f"{outcome.row.name}: {outcome.words}" for outcome in silent)
    yield figure("wrong in silence", "rows", len(silent), "0", note=note)


def counted(words: str, outcomes: Sequence[Outcome]) -> Row:
    """Of rows that are here, the share that is right or refused beforehand."""
    here = [outcome for outcome in outcomes if outcome.verdict is not Verdict.ABSENT]
    kept = [outcome for outcome in here if outcome.verdict.kept]
    tally = [
        f"{sum(outcome.verdict is verdict for outcome in outcomes)} {verdict.value}" for verdict in Verdict
    ]
    wrong = [
        f"{outcome.row.name}: {outcome.verdict.value} ({outcome.words})"
        for outcome in here
        if not outcome.verdict.kept
    ]
    share = len(kept) / len(here) if here else None
    note = "; ".join([", ".join(tally), *wrong])
    return figure(f"{words} right, or refused beforehand in words", "", share, "100 %", note=note)


def outcomes_of(
    rows: Sequence[MatrixRow], shown: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Every row's outcome, in their order; ``shown`` is called as each ends."""
    absent = {row.name: missing(row) for row in rows}
    here = [row for row in rows if not absent[row.name]]
    judgements: dict[str, Outcome] = {}

    def run_row(arena: Arena, row: MatrixRow, image: str) -> None:
        with ExitStack() as beside:
            more = {}
            if row.outside:
                port = beside.enter_context(outside.answering())
                row, more = replace(row, network=f"egress:localhost:{port}"), {"ROW_OUTSIDE": str(port)}
            judgements[row.name] = judged(arena, row, image, environment(row) | more)
        shown(judgements[row.name])

    with ExitStack() as stack:
        jobs: list[Callable[[], None]] = []
        usual = [row for row in here if not row.by_command]
        if usual:
            host = stack.enter_context(open_host(stack.enter_context(own_home())))
            image = host.context.pool.import_image(image_of(usual))
            jobs += [partial(run_row, OfHost(host, host.home), row, image) for row in usual]
        commanded = [row for row in here if row.by_command]
        if commanded:
            by_command = ByCommand(stack.enter_context(own_home()))
            stack.callback(by_command.close)
            jobs += [partial(run_row, by_command, row, image_of(commanded)) for row in commanded]
        side_by_side(jobs, min(2, os.cpu_count() or 1))
    for row in rows:
        if absent[row.name]:
            judgements[row.name] = Outcome(row, Verdict.ABSENT, absent[row.name])
            shown(judgements[row.name])
    return [judgements[row.name] for row in rows]


def missing(row: MatrixRow) -> str:
    """Why ``row`` cannot be here, in words; empty when it can."""
    try:
        host_image.chosen_packages(extra=row.packages)
        folders(row.distributions)
    except PackageNotFoundError as error:
        return f"the Python distribution {error.name} is not installed"
    except UserError as error:
        return str(error)
    return ""


def image_of(rows: Sequence[MatrixRow]) -> str:
    """The name of one image with what all these rows need."""
    packages = sorted({name for row in rows for name in row.packages})
    distributions = sorted({name for row in rows for name in row.distributions})
    more = [*packages, *(str(path) for path in folders(tuple(distributions)))]
    return f"host+{','.join(more)}" if more else "host"


def environment(row: MatrixRow) -> dict[str, str]:
    """What the shells of a row's sandbox are given."""
    places = {str(path.parent) for path in folders(row.distributions)}
    return {"ROW_PYTHON": ":".join(sorted(places))} if places else {}


def packages() -> list[str]:
    """The Debian packages of all rows, for who installs them."""
    return sorted({name for row in ROWS for name in row.packages})
