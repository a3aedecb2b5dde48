"""The daemon as a service of systemd, which starts it again when it dies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

UNIT = """\
[Unit]
Description=windtunnel sandboxes of {home}
After=local-fs.target network.target
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
ExecStart={command}
Restart=on-failure
RestartSec=100ms
RestartPreventExitStatus=2
# the sandboxes outlive the daemon, in control groups of their own
KillMode=process
Delegate=yes
LimitNOFILE=65536
TimeoutStartSec=300
TimeoutStopSec=180

[Install]
WantedBy=multi-user.target
"""


def serving(home: Path, options: Sequence[str]) -> list[str]:
    """The command that is the daemon of ``home`` in the foreground, with ``options`` of ``serve``."""
    program = Path(sys.executable).with_name("windtunnel")
    return [str(program), "sandbox", "--home", str(home), "serve", *options]


def unit(home: Path, options: Sequence[str]) -> str:
    """The unit file of a daemon of ``home``."""
    command = " ".join(map(_quoted, serving(home, options)))
    return UNIT.format(home=str(home).replace("%", "%%"), command=command)


def _quoted(word: str) -> str:
    for one, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(one, instead)
    return f'"{word}"'
