"""What CRIU cannot bring back is known by kind, and refused by name where a sandbox uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import Facts, ProcessInventory, ProcessStood
from windtunnel.agents.sandbox.policy.standing import GIVEN_BACK, LOST, NEVER, beforehand, undumpable

FACTS = {
    "eventfd-semaphore": ("descriptors", "descriptor 4", "anon_inode:[eventfd], eventfd-semaphore 1"),
    "inotify-unread": ("descriptors", "descriptor 5", "anon_inode:inotify, flags 00, 32 bytes not read"),
    "inotify-of-deleted": ("descriptors", "descriptor 5", "anon_inode:inotify, watch 1 of a deleted file, "),
    "unix-peer-is-gone": ("sockets", "descriptor 6", "Unix datagram socket connected (its peer is gone)"),
    "tcp-not-accepted": ("sockets", "descriptor 6", "IPv4 stream socket listening (1 not accepted) at x"),
    "udp-unread": ("sockets", "descriptor 7", "IPv4 datagram socket (3 bytes not read) at 127.0.0.1:9"),
    "tcp-not-sent": ("sockets", "descriptor 6", "IPv4 stream socket (9 bytes not sent) from a to b, flags 2"),
    "system-v-semaphore-undo": ("ipc", GIVEN_BACK, ""),
}
QUIET = (
    ("processes", "users", "1005 0 1007 0"),
    ("descriptors", "descriptor 3", "/workspace/a, flags 02, at 7"),
    ("descriptors", "descriptor 4", "anon_inode:[eventfd], eventfd-semaphore 0"),
    ("descriptors", "descriptor 5", "anon_inode:inotify, flags 00, watch 1 mask:100"),
    ("sockets", "descriptor 6", "IPv4 stream socket at 127.0.0.1:80"),
    ("ipc", "System V semaphores 3", "nsems 1"),
    ("threads", "threads", "7 8"),
)


def held(*facts: tuple[str, str, str]) -> ProcessInventory:
    """A process with what all may have, and ``facts`` in the place of what is called alike."""
    facts_by_kind: Facts = {}
    for kind, name, value in (*QUIET, *facts):
        facts_by_kind.setdefault(kind, {})[name] = value
    return ProcessInventory((ProcessStood(7, "python3 app.py", facts_by_kind),))


def test_every_kind_that_a_fact_shows_is_tried_here() -> None:
    assert FACTS.keys() == {loss.kind for loss in LOST if loss.fact and loss.lack != "locks"}


@pytest.mark.parametrize("name", FACTS)
def test_what_does_not_come_back_is_named_with_whose_it_is(name: str) -> None:
    kind, what, value = FACTS[name]
    (lack,) = beforehand(held(FACTS[name]))
    assert lack.kind == kind
    assert lack.what == f"python3 app.py (process 7 inside): {what}" + f", {value}" * bool(value)
    assert next(loss.why for loss in LOST if loss.kind == name) in lack.why


def test_what_comes_back_is_not_named() -> None:
    assert beforehand(held()) == ()


def test_a_posix_lock_is_named_and_no_other_lock() -> None:
    locks = {f"exclusive {kind} on descriptor 3": "" for kind in ("POSIX lock", "OFD lock", "flock")}
    (lack,) = beforehand(ProcessInventory((ProcessStood(7, "app", {"locks": locks}),)))
    assert lack.what == "app (process 7 inside): exclusive POSIX lock on descriptor 3"
    assert "SQLite" in lack.why


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("program", "/memfd:x (deleted)", "from a file in memory"),
        ("working directory", "/w/dist (deleted), and its name is another's", "the deleted folder /w/dist,"),
    ],
)
def test_what_no_restore_succeeds_with_is_refused(name: str, value: str, why: str) -> None:
    assert why in undumpable(held(("directories", name, value)))
    assert undumpable(held(("directories", name, value.partition(",")[0].replace("memfd:", "")))) == ""


SEMAPHORE = """python3 -c "
import os, time
fd = os.eventfd(3, os.EFD_SEMAPHORE); open('/workspace/ready', 'w').close(); time.sleep(1000)
" </dev/null >/dev/null 2>&1 & until [ -e /workspace/ready ]; do sleep 0.01; done"""


@pytest.mark.root
def test_a_kind_that_does_not_come_back_is_refused_by_name_at_the_checkpoint(
    make: Callable[..., Any],
) -> None:
    box = make()
    box.run(SEMAPHORE, timeout=60)
    with pytest.raises(IncompleteError) as refused:
        box.checkpoint(full=True)
    manifest = refused.value.manifest
    assert manifest is not None and manifest.image is not None, "it is kept all the same"
    (lack,) = manifest.lacks
    assert lack.kind == "descriptors" and "eventfd-semaphore 1" in lack.what and "python3 -c" in lack.what
    assert "does not bring it back" in lack.why
    assert box.checkpoint(full=True, allow_less=True).lacks == manifest.lacks


@pytest.mark.root
def test_doctor_tells_what_no_checkpoint_brings_back(home: Path) -> None:
    from windtunnel.cli.main import app

    for options, table in (([], str), (["--json"], json.loads)):
        said = CliRunner().invoke(app, ["sandbox", "--home", str(home), "doctor", *options])
        assert said.exit_code == 0, said.output
        report = table(said.stdout)
        kinds = report["kinds"] if options else report
        assert all(loss.kind in kinds and loss.why in str(kinds) for loss in LOST)
        assert all(words in str(report) for words in NEVER)
