"""What the host knows: its memory, its file, and what it may read of the device."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.trust import MAKER
from windtunnel.trust.attest import AllowList, Verifier, measure
from windtunnel.trust.attest.live.processes import LAYERS, LOADS, NOBODY, machine

PLANTED = b"planted-secret-in-the-clear"
ROWS = [314159265, 271828182]


def memory_of(pid: int) -> bytes:
    """All that a process may read and write."""
    parts = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            first, last, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
            if rights.startswith("rw"):
                memory.seek(int(first, 16))
                try:
                    parts.append(memory.read(int(last, 16) - int(first, 16)))
                except OSError:
                    continue
    return b"".join(parts)


@pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of another user's process")
def test_secrets_are_not_in_the_hosts_memory_or_file_and_it_cannot_read_the_devices(tmp_path: Path) -> None:
    allow = AllowList((MAKER.root,), {name: (measure(part),) for name, part in {**LAYERS, **LOADS}.items()})
    text = repr(ROWS).encode()
    with machine(MAKER.fuse(), tmp_path / "carried") as computer:
        session = computer.attest(Verifier(allow, {"data": PLANTED}))
        sealed = session.seal("numbers", text)
        answer = computer.call(b"R", sealed)
        assert session.open(answer, "sum") == str(sum(ROWS)).encode()
        host, kept = memory_of(computer.host), (tmp_path / "carried").read_bytes()
        for secret in (PLANTED, text, str(sum(ROWS)).encode()):
            assert secret not in host
            assert secret not in kept
        # the search can fail: it finds what the host does carry, and the secrets where they are
        assert sealed in kept and sealed[-40:] in host
        assert PLANTED in memory_of(computer.device)
        assert os.stat(f"/proc/{computer.host}").st_uid == NOBODY
        child = os.fork()
        if child == 0:  # as the host's user
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                os.close(os.open(f"/proc/{computer.device}/mem", os.O_RDONLY))
                os._exit(1)
            except PermissionError:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
