"""What is read without CRIU: its log, the kernel's table of connections, the ladder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.waiting import until
from windtunnel.agents.sandbox.criu.doctor import LADDER, ladder, rung
from windtunnel.agents.sandbox.criu.failure import explain_dump, explain_restore, real_errors
from windtunnel.agents.sandbox.criu.program import default_prefix, find_criu
from windtunnel.agents.sandbox.inventory.sockets import (
    TCP_REPAIR,
    Connection,
    close_orphans,
    end,
    leave_repair,
    orphans,
)
from windtunnel.agents.sandbox.model import Facility
from windtunnel.linux.processes import state

RLIMIT = "Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
DUMP_END = "Error (criu/cr-dump.c:1545): Dump files (pid: 4194305) failed with -1\nError (criu/cr-dump.c:1975): Dumping FAILED.\n"  # noqa: E501
RESTORE_END = "Error (criu/cr-restore.c:2331): Restoring FAILED.\nError (criu/cgroup.c:2055): cg: cgroupd: recv req error: No such file or directory\n"  # noqa: E501


def test_an_unknown_line_is_handed_on_and_harmless_ones_are_not() -> None:
    log = f"{RLIMIT}Error (criu/x.c:1): the moon is full\nError (criu/x.c:1): the moon is full\n{DUMP_END}"
    said = explain_dump(log, 4194304)
    assert said.startswith("process image: CRIU failed at process 4194305: the moon is full; Dump files")
    assert real_errors(log)[0] == "the moon is full"
    assert explain_dump(RLIMIT, 1).endswith("it says nothing in its log")
    assert explain_restore("sh: 2: cannot create /x: Directory nonexistent\n").endswith(
        "/x: Directory nonexistent"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "     1: Error (criu/files-reg.c:2175): File usr/lib/x.so has bad size 7 (expect 9)",
            "usr/lib/x.so",
        ),
        (
            "     1: Error (criu/files-reg.c:2267): Can't open file work/a: No such file or directory",
            "work/a",
        ),
    ],
)
def test_a_failed_restore_names_what_does_not_fit(line: str, words: str) -> None:
    said = explain_restore(f"{RLIMIT}{line}\n{RESTORE_END}")
    assert said.startswith(f"process restore: {words} is not as it was at the checkpoint")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "(criu/files-reg.c:1): Can't dump ghost file /w/big of 73400320 size, increase limit",
            "file /w/big open",
        ),
        (
            "(criu/files-reg.c:1): Can't create link remap for /w/a. Use link-remap option.",
            "holds /w/a open, which",
        ),
        (
            "(criu/files.c:1): Can't lookup mount=7 for fd=3 path=/queue",
            "/queue open on a file system that no",
        ),
        (
            "(criu/files-ext.c:1): Can't dump file 3 of that type [600] (chr 10:232)",
            "cannot keep (chr 10:232)",
        ),
        (
            "(criu/sk-unix.c:1): unix: External socket is used. Consider using",
            "a process outside the sandbox",
        ),
    ],
)
def test_a_refused_dump_names_the_process_and_what_it_holds(line: str, words: str) -> None:
    said = explain_dump(f"{RLIMIT}Error {line}\n{DUMP_END}", 4194304)
    assert said.startswith("process image: process 4194305 ") and words in said


@given(st.text(max_size=200), st.integers(min_value=1, max_value=2**22))
def test_any_log_gives_one_sentence(noise: str, pid: int) -> None:
    for said in (explain_dump(f"Error (x): {noise}", pid), explain_restore(f"Error (x): {noise}")):
        assert said.startswith("process ")


def test_only_ends_without_their_mirror_are_orphans() -> None:
    five, six, seven, eight, nine = (end(socket.AF_INET, ("127.0.0.1", port)) for port in range(5, 10))
    mapped = [end(socket.AF_INET6, ("::ffff:127.0.0.1", port)) for port in (6, 5)]
    inside = {"a": Connection(five, six), "b": Connection(*mapped)}
    away = Connection(seven, end(socket.AF_INET, ("10.0.0.9", 443)))
    assert orphans(inside) == []
    assert orphans({**inside, "c": away, "d": Connection(eight, nine)}) == ["c", "d"]


LOST = """
import socket, sys
server = socket.create_server(("localhost", 0))
near, (other, _) = socket.create_connection(server.getsockname()), server.accept()
plug = socket.create_connection(("localhost", int(sys.argv[1])))
print("up", flush=True)
try: said = plug.recv(1)
except ConnectionError: said = "lost"
near.sendall(b"x")
print(said, other.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_who_waits_on_a_connection_that_lost_its_other_end_is_told() -> None:
    with socket.create_server(("localhost", 0)) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", LOST, str(server.getsockname()[1])], stdout=subprocess.PIPE, text=True
        )
        with child, server.accept()[0]:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            until(lambda: state(child.pid) == "S")
            close_orphans([child.pid])
            assert child.stdout.readline() == "lost b'x'\n"


def test_the_ladder_never_promises_what_is_missing() -> None:
    _, names = LADDER[0]
    for missing in (*names, None):
        facilities = [Facility(name, name != missing, "", "") for name in names]
        mine, needs = rung(facilities)
        assert missing not in needs
        assert f"-> {mine}" in ladder(facilities)
    assert rung([]) is LADDER[-1]


def test_a_program_that_is_no_criu_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "criu"
    monkeypatch.setenv("WINDTUNNEL_CRIU", str(fake))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("windtunnel.agents.sandbox.criu.program.default_prefix", lambda: tmp_path / "none")
    for text in (None, "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho something else\n"):
        if text is not None:
            fake.write_text(text)
            fake.chmod(0o755)
        assert find_criu() is None
    fake.write_text("#!/bin/sh\necho Version: 4.2.1\n")
    criu = find_criu()
    assert criu is not None
    assert (criu.path, criu.version) == (fake, (4, 2, 1))
    assert default_prefix().is_absolute()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_connection_that_a_killed_dump_left_half_read_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with near, other:
            other.settimeout(20)
            other.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            assert leave_repair([os.getpid()]) == 1
            assert leave_repair([os.getpid()]) == 0
            near.sendall(b"x")
            assert other.recv(1) == b"x"
