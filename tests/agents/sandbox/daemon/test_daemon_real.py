"""The daemon in front of real sandboxes, through the command line's own way: started in passing, killed,
started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.waiting import gone, until
from windtunnel.agents.sandbox.client import connect
from windtunnel.agents.sandbox.daemon import launch
from windtunnel.agents.sandbox.daemon.server import held
from windtunnel.agents.sandbox.errors import SandboxDied
from windtunnel.agents.sandbox.model import SandboxSpec, TurnClass
from windtunnel.base.errors import UserError


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
            assert {one.name: one.size for one in box.listdir("/tmp")}["file"] == 4
            made = box.checkpoint("kept")
            (fork,) = client.fork(made.id, names=["f"])
            assert fork.run("hostname; pwd; echo $A").stdout == b"f\n/tmp\nb c\n"
            assert box.run("sleep 600", timeout=0.2).ended == "timeout"

            daemon = client.health().pid
            os.kill(daemon, signal.SIGKILL)
            until(lambda: gone(daemon))
            assert box.run("pwd; echo $A; echo more >&3").stdout == b"/tmp\nb c\n"
            assert client.health().pid != daemon
            assert {one.name: one.status for one in client.boxes()} == {"a": "running", "f": "running"}

            box.stop()
            with pytest.raises(SandboxDied, match="stopped"):
                box.run("true")
            report = box.restore(made.id)
            assert report.checkpoint == made.id
            assert box.run("pwd; echo $A; cat /tmp/file").stdout == b"/tmp\nb c\n\0put"
            assert box.info().processes.count("sleep 600") == 1
            assert [one.label for one in box.log().checkpoints].count("kept") == 1
            with pytest.raises(UserError, match="unknown"):
                client.get("nobody")
        finally:
            client.down()
    with held(own_home):  # the daemon has let go of the home
        assert not launch.answers(own_home)
