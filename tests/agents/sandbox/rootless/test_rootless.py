"""Sandboxes of an ordinary user: the same commands, turns, checkpoints and forks, without root."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.machine import launch

Tell = Callable[..., None]
STORIES = (
    "turns", "isolation", "restore", "forks", "freeze", "crash", "leftovers", "proxy", "refusals",
)  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_user_without_root(tell: Tell, story: str) -> None:
    tell(story)


def test_where_no_user_namespace_may_be_made_the_setting_is_named(tell: Tell) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare(1)")
    # inside a user namespace of its own, the setting can be closed for what is below it alone
    close = 'echo 0 >/proc/sys/user/max_user_namespaces || exit 9; exec "$@"'
    tell("closed", unshare, "--user", "--map-user=1000", "--keep-caps", "sh", "-c", close, "sh")


@pytest.mark.conformance
def test_a_user_makes_an_image_of_the_host(tell: Tell) -> None:
    if not Path("/var/lib/dpkg/status").is_file():
        pytest.skip("needs a Debian")
    tell("image_of_the_host")


def test_a_host_image_leaves_out_what_the_user_may_not_read(tell: Tell, home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a file that the user may not read")
    fake = home / "fake"
    (fake / "usr").mkdir(parents=True)
    (fake / "usr/tool").write_text("for all")
    (fake / "usr/hidden").write_text("for root")
    (fake / "usr/hidden").chmod(0o600)
    (fake / "var/lib/dpkg/info").mkdir(parents=True)
    (fake / "var/lib/dpkg/info/tool.list").write_text("/usr/tool\n/usr/hidden\n")
    tell("partial")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ],
)
def test_root_is_told_of_what_is_closed_to_users(tmp_path: Path, name: str, value: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: others are told what a trial says")
    assert launch.refusal(tmp_path) == ("", "")
    file = tmp_path / name
    file.parent.mkdir()
    file.write_text(f"{value}\n")
    why, remedy = launch.refusal(tmp_path)
    assert name.replace("/", ".") in why
    assert remedy.startswith("sysctl -w ")
