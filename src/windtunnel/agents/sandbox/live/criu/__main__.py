"""``python -m windtunnel.agents.sandbox.live.criu setup [PREFIX] | doctor``: for scripts."""

from __future__ import annotations

import sys
from pathlib import Path

from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.live.criu.doctor import doctor, ladder
from windtunnel.agents.sandbox.live.criu.install import setup
from windtunnel.base.errors import UserError


def main(arguments: list[str]) -> int:
    match arguments:
        case ["doctor"]:
            facilities = doctor()
            for facility in facilities:
                remedy = f"; {facility.remedy}" if facility.remedy else ""
                print(
                    f"{'yes' if facility.present else 'no ':<4}{facility.name:<16}{facility.detail}{remedy}"
                )
            print(ladder(facilities))
        case ["setup"] | ["setup", _]:
            try:
                setup(Path(arguments[1]) if len(arguments) > 1 else None, progress=print)
            except (CriuError, UserError) as failed:
                print(getattr(failed, "details", ""), failed, sep="\n", file=sys.stderr)
                return 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
