"""Namespaces and links go with the command that made them, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import until
from windtunnel.linux import network

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
"""
NAMES = Path("/run/netns")
COMMAND = "from windtunnel.training.bottleneck import analyse; import sys; "
COMMAND += "analyse(sys.argv[1], cluster='cpu:2x1', live=[2], live_rates=[1e3])"


def bridges() -> set[str]:
    """Of emulated networks on this machine, with what is left of their hosts."""
    links = {name.partition("p")[0] for _, name in socket.if_nameindex() if name.startswith("wt")}
    return links | {file.name.partition("-")[0] for file in NAMES.glob("wt*-*")}


@pytest.mark.root
@pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_command_that_is_killed(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    before = bridges()
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path / "train.py")],
        env=os.environ | {"WINDTUNNEL_HOME": str(tmp_path)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: len([*NAMES.glob("wt*-1")]) > 0 and bridges() - before, "a network of two hosts")
        command.send_signal(number)
        assert command.wait(60) != 0
        until(lambda: not bridges() - before, "its networks go")
    finally:
        command.kill()
        command.wait()
