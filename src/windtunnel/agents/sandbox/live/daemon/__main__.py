"""The daemon as it is started in the background; its words go to the home's ``daemon.log``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from windtunnel.agents.sandbox.live.daemon.server import end, run
from windtunnel.base.errors import UserError

IDLE_SECONDS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m windtunnel.agents.sandbox.live.daemon")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="end after so many seconds unused")
    given = parser.parse_args()
    try:
        run(given.home.absolute(), idle_seconds=given.idle)
    except UserError as error:
        print(f"windtunnel: {error}", file=sys.stderr, flush=True)
        end(2)
    end(0)


if __name__ == "__main__":
    main()
