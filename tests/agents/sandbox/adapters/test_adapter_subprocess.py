"""The subprocess-like adapter does what ``subprocess`` does."""

from __future__ import annotations

import subprocess as real
from collections.abc import Callable
from typing import Any

import pytest

from windtunnel.agents.sandbox.adapters import subprocess as ours
from windtunnel.agents.sandbox.client import Client, RemoteBox
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError


@pytest.fixture
def box(client: Client) -> RemoteBox:
    return client.create(SandboxSpec("a"))


@pytest.mark.parametrize(
    "args",
    [
        (["printf", "%s|", "a b", "", "$HOME", "it's", "ü\n"],),
        (["sh", "-c", "echo out; echo err >&2; exit 3"],),
        (["bash", "-c", "kill -TERM $$"],),
        (["cat"],),
        (["false"],),
    ],
)
@pytest.mark.parametrize("options", [{}, {"text": True}, {"stderr": ours.STDOUT}])
def test_run_is_that_of_the_standard_library(box: RemoteBox, args: Any, options: dict[str, Any]) -> None:
    streams = {"stdout": real.PIPE, "stderr": real.PIPE, "stdin": real.DEVNULL, **options}
    expected = real.run(*args, check=False, **streams)
    completed = ours.run(box, *args, **streams)
    assert (completed.returncode, completed.stdout, completed.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_shell_directory_and_environment(box: RemoteBox) -> None:
    completed = ours.run(
        box, "echo $A $1; pwd; echo ${PATH-none}", shell=True, cwd="/", env={"A": "x y"}, capture_output=True
    )
    assert completed.stdout.splitlines()[:2] == [b"x y", b"/"]
    assert ours.check_output(box, ["env"], env={"ONLY": "this"}).splitlines() == [b"ONLY=this"]
    assert ours.run(box, ["true"], cwd="/nowhere").returncode == 126


def test_errors_are_those_of_the_standard_library(box: RemoteBox) -> None:
    with pytest.raises(real.CalledProcessError) as failed:
        ours.run(box, ["sh", "-c", "echo out; exit 9"], check=True, capture_output=True)
    assert (failed.value.returncode, failed.value.stdout) == (9, b"out\n")
    with pytest.raises(real.TimeoutExpired) as late:
        ours.run(box, ["sh", "-c", "echo out; sleep 600"], timeout=0.3, stdout=ours.PIPE)
    assert late.value.output == b"out\n"
    with pytest.raises(real.CalledProcessError):
        ours.check_output(box, ["false"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda box: ours.run(box, ["cat"], stdin=0), "stdin"),
        (lambda box: ours.run(box, ["cat"], stdout=7), "no file"),
        (lambda box: ours.run(box, []), "empty"),
        (lambda box: ours.run(box, ["cat"], env={"A=B": "x"}), "A=B"),
    ],
)
def test_what_a_sandbox_has_not_is_refused_in_words(
    box: RemoteBox, call: Callable[[RemoteBox], Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        call(box)
