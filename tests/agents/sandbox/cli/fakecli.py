"""The command line, with a daemon of the fake host where it would start the real one."""

import sys
from pathlib import Path

FAKE = Path(__file__).parent.parent / "daemon" / "fakehost.py"

if __name__ == "__main__":
    from windtunnel.agents.sandbox import daemon as launch
    from windtunnel.cli.main import main

    launch.COMMAND = (sys.executable, str(FAKE), "--idle", "300")
    main()
