"""Processes in namespaces of their own, made without a helper program."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from windtunnel.linux import mounts, namespaces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="new namespaces need root")


def test_a_process_lives_apart_and_nobody_else_notices(tmp_path: Path) -> None:
    """On a host of another name, with a small file system where others see a folder."""
    here = platform.node()

    def start() -> subprocess.Popen[str]:
        socket.sethostname("elsewhere")
        mounts.mount("tmpfs", tmp_path, "tmpfs", options="size=64k")
        command = ["sh", "-c", 'uname -n; echo; touch "$0/made"; read -r _', str(tmp_path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with namespaces.apart(("uts", "mnt"), start) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "elsewhere\n"
        folder = Path(f"/proc/{process.pid}/root{tmp_path}")
        assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize == 64 << 10
        process.communicate("")
    assert platform.node() == os.uname().nodename == here
    assert not mounts.at(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_done_apart_fails_as_it_would_here() -> None:
    with pytest.raises(ZeroDivisionError):
        namespaces.apart((), lambda: 1 // 0)
