"""What this host cannot bring back is known by kind, and refused by name where a sandbox uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.agents.sandbox.errors import LessError
from windtunnel.agents.sandbox.live import probe
from windtunnel.agents.sandbox.live.criu.kinds.__main__ import kinds as programs
from windtunnel.agents.sandbox.model import Inventory, KindTried, LockStood, ProcessStood, TimerStood
from windtunnel.agents.sandbox.policy.kinds import RULES, TRIED, beforehand
from windtunnel.agents.sandbox.policy.standing import GIVEN_BACK

FACTS = {
    "other-user": ("processes", "users", "1001 1001 1001 1001"),
    "mixed-user": ("processes", "users", "1005 0 1007 0"),
    "eventfd": ("descriptors", "descriptor 4", "anon_inode:[eventfd], eventfd-count 1, flags 02"),
    "eventfd-semaphore": ("descriptors", "descriptor 4", "anon_inode:[eventfd], eventfd-semaphore 1"),
    "inotify": ("descriptors", "descriptor 5", "anon_inode:inotify, flags 00, watch 1 mask:100"),
    "inotify-unread": ("descriptors", "descriptor 5", "anon_inode:inotify, flags 00, 32 bytes not read"),
    "inotify-of-deleted": ("descriptors", "descriptor 5", "anon_inode:inotify, watch 1 of a deleted file, "),
    "unix-peer-is-gone": ("sockets", "descriptor 6", "Unix datagram socket connected (its peer is gone)"),
    "terminal-raw": ("descriptors", "descriptor 0", "/dev/pts/3, flags 02"),
    "tcp": ("sockets", "descriptor 6", "IPv4 stream socket at 127.0.0.1:80"),
    "tcp-not-accepted": ("sockets", "descriptor 6", "IPv4 stream socket listening (1 not accepted) at x"),
    "udp-unread": ("sockets", "descriptor 7", "IPv4 datagram socket (3 bytes not read) at 127.0.0.1:9"),
    "system-v-semaphore-undo": ("ipc", GIVEN_BACK, ""),
    "posix-timer": ("timers", "POSIX timer 0", "signal 14, signal/pid, clock 1"),
}
QUIET = (
    ("processes", "users", "0 0 0 0"),
    ("descriptors", "descriptor 3", "/workspace/a, flags 02, at 7"),
    ("threads", "threads", "7 8"),
)


def held(*facts: tuple[str, str, str], **more: Any) -> Inventory:
    lines = "\n".join("\t".join(fact) for fact in (*QUIET, *facts))
    return Inventory((ProcessStood(7, "python3 app.py", lines, **more),))


def broken(*names: str) -> list[KindTried]:
    return [KindTried(name, name, name not in names, "it was gone" * (name in names)) for name in TRIED]


def test_every_kind_that_is_tried_is_a_program() -> None:
    assert set(TRIED) <= programs().keys() and len(set(TRIED)) == len(TRIED)


@pytest.mark.parametrize("name", FACTS)
def test_what_does_not_come_back_is_named_with_whose_it_is(name: str) -> None:
    kind, what, value = FACTS[name]
    (lack,) = beforehand(held(FACTS[name]), broken(name))
    assert lack.kind == kind
    assert lack.what == f"python3 app.py (process 7 inside): {what}" + f", {value}" * bool(value)
    assert "it was gone" in lack.why
    assert not beforehand(held(FACTS[name]), broken())
    assert not beforehand(held(), broken(name))
    unknown = [KindTried(each.name, each.words, None if not each.back else True) for each in broken(name)]
    assert not beforehand(held(FACTS[name]), unknown), "what could not be tried is not refused"


def test_locks_and_timers_are_named_by_kind() -> None:
    stood = held(
        locks=(LockStood(3, "POSIX", True, 0, None), LockStood(4, "FLOCK", True, 0, None)),
        timers=(TimerStood(5, 1, 0, 0, 10, 10), TimerStood(6, 1, 0, 0, 10, 0)),
    )
    assert [lack.what for lack in beforehand(stood, broken("flock", "timerfd-periodic"))] == [
        "python3 app.py (process 7 inside): exclusive flock on descriptor 4",
        "python3 app.py (process 7 inside): timerfd 5",
    ]


@given(st.lists(st.sampled_from(sorted(FACTS)), unique=True), st.sets(st.sampled_from(sorted(TRIED))))
def test_no_more_is_named_than_there_is(there: list[str], lost: set[str]) -> None:
    named = beforehand(held(*(FACTS[name] for name in there)), broken(*lost))
    assert len(named) <= len(there) and len(set(named)) == len(named)
    if not lost & {rule.kind for rule in RULES}:
        assert not named


SEMAPHORE = """python3 -c "
import os, time
fd = os.eventfd(3, os.EFD_SEMAPHORE); open('/workspace/ready', 'w').close(); time.sleep(1000)
" </dev/null >/dev/null 2>&1 & until [ -e /workspace/ready ]; do sleep 0.01; done"""


@pytest.mark.root
def test_a_kind_that_does_not_come_back_is_refused_by_name_at_the_checkpoint(
    make: Callable[..., Any],
) -> None:
    if "eventfd-semaphore" not in {kind.name for kind in probe.known() if not kind.back}:
        pytest.skip("this host brings everything back that this test knows")
    box = make()
    box.run(SEMAPHORE, timeout=60)
    with pytest.raises(LessError) as refused:
        box.checkpoint(full=True)
    made = refused.value.manifest
    assert made is not None and made.image is not None, "it is kept all the same"
    (lack,) = made.lacks
    assert lack.kind == "descriptors" and "eventfd-semaphore 1" in lack.what and "python3 -c" in lack.what
    assert "does not bring it back" in lack.why
    assert box.checkpoint(full=True, allow_less=True).lacks == made.lacks


LEFT_ALONE = """cat > /workspace/p.py <<'END'
import ctypes, os, socket, time
libc = ctypes.CDLL(None)
watch, kept = libc.inotify_init1(0), open("kept", "w")
for name in ("first", "second"):
    os.open(name, os.O_RDWR | os.O_CREAT)
    libc.inotify_add_watch(watch, name.encode(), 2)
    os.unlink(name)
libc.inotify_add_watch(watch, b"/workspace/kept", 2)
server, lost = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
server.bind("/workspace/server"); lost.bind("/workspace/lost")
one, other = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
one.connect("/workspace/server"); other.connect("/workspace/lost"); lost.close()
open("/workspace/ready", "w").write(f"{watch} {other.fileno()}")
time.sleep(1000)
END
cd /workspace; python3 p.py </dev/null >/dev/null 2>&1 &
until [ -s /workspace/ready ]; do sleep 0.01; done; cat /workspace/ready"""


@pytest.mark.root
def test_a_watch_of_a_deleted_file_and_a_peer_that_is_gone_are_refused_at_the_checkpoint(
    make: Callable[..., Any],
) -> None:
    """And nothing that is beside them, which is as usual: two of three watches, one of two connections."""
    lost = {"inotify-of-deleted", "unix-peer-is-gone"}
    if not lost <= {kind.name for kind in probe.known() if kind.back is False}:
        pytest.skip("this host brings them back")
    box = make()
    watch, socket = box.run(LEFT_ALONE, timeout=60).text.split()
    with pytest.raises(LessError) as refused:
        box.checkpoint(full=True)
    made = refused.value.manifest
    assert made is not None and made.image is not None, "it is kept all the same"
    watching, connected = made.lacks
    assert f": descriptor {watch}, anon_inode:inotify, " in watching.what and "p.py" in watching.what
    assert watching.what.count("of a deleted file") == 2
    assert f": descriptor {socket}, Unix datagram socket connected (its peer is gone)" in connected.what
    assert all("does not bring it back" in lack.why for lack in made.lacks)


@pytest.mark.root
def test_doctor_tells_each_kind_and_tries_them_once_a_boot(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windtunnel.cli.main import app

    first = probe.known()
    assert {kind.name for kind in first} == set(TRIED)
    back = {kind.name for kind in first if kind.back}
    assert back >= {"other-user", "posix-lock", "timerfd-periodic", "inotify", "terminal", "tcp", "threads"}
    assert all(kind.back or kind.why for kind in first)
    monkeypatch.setattr(probe, "_tried_apart", lambda: pytest.fail("it was tried again"))
    said = CliRunner().invoke(app, ["sandbox", "--home", str(home), "doctor", "--json"])
    assert said.exit_code == 0, said.output
    told = {kind["name"]: kind for kind in json.loads(said.stdout)["kinds"]}
    assert told["io-uring"]["back"] is False and "not permitted" in told["io-uring"]["why"]
