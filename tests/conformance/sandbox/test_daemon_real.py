"""The daemon in front of real sandboxes, through the command line's own way: started in passing, killed,
started again."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest

from agents.sandbox.daemon.daemons import pid_of
from support.waiting import gone, until
from windtunnel.agents.sandbox import daemon as launch
from windtunnel.agents.sandbox.client import connect, get_path, put_path
from windtunnel.agents.sandbox.daemon.server import home_lock
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied
from windtunnel.agents.sandbox.model import SandboxSpec, TurnClass
from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.commands import terminal_of


@pytest.mark.root
@pytest.mark.slow
def test_real_sandboxes_outlive_their_daemon(own_home: Path) -> None:
    with connect(own_home) as client:
        try:
            box = client.create(SandboxSpec("a"))
            assert box.run("echo $$; cd /tmp; export A='b c'; sleep 600 & exec 3>/tmp/log").exit_code == 0
            assert box.end_turn().wait(60).turn_class is TurnClass.FULL
            assert box.run("printf '\\377\\0'; head -c 3000000 /dev/zero").stdout == b"\xff\0" + bytes(
                3_000_000
            )
            box.put("/tmp/file", b"\0put")
            assert {entry.name: entry.size for entry in box.listdir("/tmp")}["file"] == 4
            checkpoint = box.checkpoint("kept")
            (fork,) = client.fork(checkpoint.id, name="f")
            assert fork.run("hostname; pwd; echo $A").stdout == b"f\n/tmp\nb c\n"
            assert box.run("sleep 600", timeout=0.2).ended == "timeout"

            daemon = pid_of(own_home)
            os.kill(daemon, signal.SIGKILL)
            until(lambda: gone(daemon))
            assert box.run("pwd; echo $A; echo more >&3").stdout == b"/tmp\nb c\n"
            assert pid_of(own_home) != daemon
            assert {sandbox.name: sandbox.status for sandbox in client.boxes()} == {
                "a": "running",
                "f": "running",
            }

            box.stop()
            with pytest.raises(SandboxDied, match="stopped"):
                box.run("true")
            report = box.restore(checkpoint.id)
            assert report.checkpoint == checkpoint.id
            assert box.run("pwd; echo $A; cat /tmp/file").stdout == b"/tmp\nb c\n\0put"
            assert box.info().processes.count("sleep 600") == 1
            assert [entry.label for entry in box.log().checkpoints].count("kept") == 1
            with pytest.raises(UserError, match="unknown"):
                client.get("nobody")
        finally:
            client.down()
    with home_lock(own_home):  # the daemon has let go of the home
        assert not launch.answers(own_home)


@pytest.mark.root
@pytest.mark.slow
def test_input_folders_and_a_terminal_of_a_real_sandbox(own_home: Path, tmp_path: Path) -> None:
    with connect(own_home) as client:
        try:
            box = client.create(SandboxSpec("a"))
            data = os.urandom(300_000)
            assert box.run("cat", stdin=data).stdout == data
            assert box.run("head -c 2", stdin=io.BytesIO(data)).stdout == data[:2]
            assert box.run("true", stdin=data).exit_code == 0
            assert box.run("cat").stdout == b""
            (tmp_path / "in" / "deep" / "empty").mkdir(parents=True)
            (tmp_path / "in" / "deep" / "it's").write_bytes(data)
            (tmp_path / "in" / "link").symlink_to("deep/it's")
            put_path(box, tmp_path / "in", "/workspace/x")
            assert box.run("cat /workspace/x/link").stdout == data
            get_path(box, "/workspace/x", tmp_path / "out")
            assert (tmp_path / "out" / "deep" / "empty").is_dir()
            assert (tmp_path / "out" / "link").read_bytes() == data
            os.mkfifo(tmp_path / "in" / "fifo")
            with pytest.raises(IncompleteError, match="fifo"):
                put_path(box, tmp_path / "in", "/workspace/x")
            typed = b"tty; exit 5\n"
            shown = box.run(terminal_of("exec sh -i"), shell="terminal", stdin=typed, timeout=60)
            assert b"/dev/pts/" in shown.stdout and shown.exit_code == 5
            assert box.end_turn().wait(60).lacks == ()
        finally:
            client.down()
