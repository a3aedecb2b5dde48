"""The bound of a sandbox's disk, tried from inside: it holds, and a sandbox that has reached it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox import host as hosts
from windtunnel.agents.sandbox.context import disk_limit_of
from windtunnel.agents.sandbox.files import Pool, btrfs_pool
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec
from windtunnel.agents.sandbox.policy.queues import disk_limit
from windtunnel.base.errors import UserError

pytestmark = pytest.mark.root

LIMIT = 32 << 20


def test_a_full_disk_stops_who_fills_it_and_nobody_else(host: Any, make: Callable[..., Any]) -> None:
    box = make(limits=SandboxLimits(disk=LIMIT))
    box.run("(while :; do echo tick; sleep 0.05; done) & x=kept")
    filled = box.run("echo before; dd if=/dev/zero of=/workspace/big bs=1M; echo $?; echo after >&2")
    assert filled.stdout.replace(b"tick\n", b"") == b"before\n1\n"
    assert filled.exit_code == 0 and b"quota exceeded" in filled.stderr and b"after\n" in filled.stderr
    assert box.run("cp /bin/bash /workspace/more").exit_code == 1
    with pytest.raises(UserError, match="quota exceeded"):
        box.put("/workspace/put", bytes(1 << 20))
    said = box.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert said.exit_code == 0 and said.stdout == b"x" * 3_000_000
    manifest = box.checkpoint(full=True)
    box.restore(manifest.id)
    assert box.run("echo $x; kill %1 && echo ran").text == "kept\nran\n"
    (fork,) = host.fork(manifest.id)
    for each in (box, fork):
        assert each.run("head -c 4M /dev/zero >/workspace/more").exit_code == 1, "a restore is no new disk"
        assert each.run("rm /workspace/big").exit_code == 0
        each.restore(each.checkpoint(full=True).id)
        assert each.run("echo fine >/workspace/small; cat /workspace/small").text == "fine\n"
    assert fork.run("cat /etc/hostname").text == f"{fork.name}\n"


def test_what_nobody_asked_for_is_bounded_by_the_pool(host: Any, make: Callable[..., Any]) -> None:
    size = host.context.pool.usage()[1]
    asked = {
        limit: disk_limit_of(host.context, SandboxSpec("x", limits=SandboxLimits(disk=limit)))
        for limit in (0, None, 9)
    }
    assert asked == {0: int(size * 0.8), None: None, 9: 9}
    assert disk_limit(0, 1 << 40, bounded=True) == 10 << 30
    assert disk_limit(0, 1 << 40, bounded=False) is None


def test_a_limit_that_cannot_be_held_is_refused(new_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "open_pool", lambda folder, size: Pool(folder))
    with SandboxHost(new_home) as host:
        with pytest.raises(UserError, match="of 64 MiB of disk cannot be held here: that needs a btrfs pool"):
            host.create(SandboxSpec("one", limits=SandboxLimits(disk=64 << 20)))
        assert host.boxes() == []


def test_outputs_have_a_bound_of_their_own(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btrfs_pool, "CHANNEL_MOST", 16 << 20)
    box = make()
    cut = box.run("head -c 64M /dev/zero")
    assert cut.exit_code == 1 and "cut" in cut.note and 8 << 20 < len(cut.stdout) < 17 << 20
    whole = box.run("echo whole")
    assert (whole.stdout, whole.note, whole.exit_code) == (b"whole\n", "", 0)
    # what was left running may say as much as it likes
    box.run("yes & until ! kill -0 $! 2>/dev/null; do sleep 0.01; done", timeout=0.5)
    received = 0

    def listen(stream: str, data: bytes) -> None:
        nonlocal received
        received += len(data)

    paced = "for i in $(seq 24); do head -c 1M /dev/zero; read -t 0.03 <> <(:); done"
    assert box.run(paced, on_output=listen).tails == ("stdout",)
    assert received == 24 << 20, "more than there is room for at once"
