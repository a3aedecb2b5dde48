"""Runs named functions of a script: all, those named, or (``by-rank``) the one whose turn is this rank's."""

import os
import sys
import traceback


def run(cases: dict, chosen: list[str]) -> None:
    names = [name for name in cases if name.startswith("case_")]
    if chosen == ["by-rank"]:
        cases[names[int(os.environ["RANK"])]]()
        return
    failed = 0
    for name in chosen or names:
        try:
            cases[name]()
        except Exception:
            failed += 1
            print(f"{name} failed:")
            traceback.print_exc(file=sys.stdout)
    sys.exit(1 if failed else None)
