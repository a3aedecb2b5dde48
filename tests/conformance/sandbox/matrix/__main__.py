"""Run the matrix, or some rows of it: ``python -m conformance.sandbox.matrix``.

    … --list                          the rows, and what of them is not here
    … --packages                      the Debian packages that all rows need, one a line
    … --row NAME [--row NAME]         rows whose names contain this
    … --into docs/benchmarks/sandbox-programs.md          write the table between its markers

Exit status 0: every row is right or refused beforehand; 3: one is not; 2: there is no such row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.agents.sandbox.harness import missing as missing_host
from conformance.sandbox.matrix.row import Outcome, Verdict
from conformance.sandbox.matrix.run import ROWS, missing, outcomes_of, packages
from conformance.sandbox.matrix.table import write


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The matrix of foreign programs.")
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="rows that contain NAME")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--packages", action="store_true", help="list the Debian packages they need")
    parser.add_argument("--json", action="store_true", help="outcomes as JSON")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write the table into this page")
    given = parser.parse_args(words)
    if given.packages:
        print("\n".join(packages()))
        return 0
    rows = [
        row for row in ROWS if not given.row or any(word.lower() in row.name.lower() for word in given.row)
    ]
    if not rows:
        parser.error(f"no row contains {' or '.join(map(repr, given.row))}; --list names them")
    if given.list:
        for row in rows:
            print(f"{row.kind}: {row.name}" + (f" (not here: {why})" if (why := missing(row)) else ""))
        return 0
    why = missing_host()
    if why:
        parser.error(why)
    outcomes = outcomes_of(rows, lambda outcome: print(line(outcome), file=sys.stderr, flush=True))
    if given.json:
        print(json.dumps([plain(outcome) for outcome in outcomes], indent=1, ensure_ascii=False))
    if given.into:
        write(given.into, outcomes)
    return 0 if all(outcome.verdict.kept or outcome.verdict is Verdict.ABSENT for outcome in outcomes) else 3


def line(outcome: Outcome) -> str:
    return f"{outcome.seconds:5.1f} s  {outcome.verdict.value:20}  {outcome.row.name}" + (
        f": {outcome.words}" if outcome.words else ""
    )


def plain(outcome: Outcome) -> dict[str, object]:
    return {
        "row": outcome.row.name, "kind": outcome.row.kind, "verdict": outcome.verdict.value,
        "words": outcome.words, "seconds": round(outcome.seconds, 2),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
