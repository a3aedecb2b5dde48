"""The daemon as a service of systemd, which starts it again when it dies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from windtunnel.base.tls import OPTIONS

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


def unit(home: Path, tls: Sequence[str], options: Sequence[str]) -> str:
    """The unit file of a daemon of ``home``, with the files of ``tls`` and ``options`` of ``serve``."""
    before = [word for pair in zip(OPTIONS, tls, strict=False) for word in pair]
    program = Path(sys.executable).with_name("windtunnel")
    command = [str(program), "sandbox", "--home", str(home), *before, "serve", *options]
    return UNIT.format(home=str(home).replace("%", "%%"), command=" ".join(map(_quoted, command)))


def _quoted(word: str) -> str:
    for plain, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(plain, instead)
    return f'"{word}"'
