"""What is wrong is told to Python's callers by the names of parameters, and on the command line by flags."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.data import embeddings
from windtunnel.network import dag, multicast, torus
from windtunnel.serving import engine

NOWHERE = Path("nowhere.csv")


@pytest.mark.parametrize(
    ("call", "words", "flags"),
    [
        (
            lambda: torus.plan("3x3", ["9,9"]),
            "network torus plan --dims 3x3 --fail 9,9",
            {"failed": "--fail"},
        ),
        (
            lambda: multicast.plan(8, 2, [0], 1e9, multicast.MulticastWorld(), ["3-3"]),
            "network multicast plan --racks 8 --fail 3-3",
            {"failed": "--fail"},
        ),
        (
            lambda: dag.plan(NOWHERE, "edf"),
            f"network dag run {NOWHERE} --schedule edf",
            {"schedule": "--schedule"},
        ),
        (
            lambda: embeddings.plan_run("a100-80:1x2"),
            "embeddings plan --cluster a100-80:1x2",
            {"synthetic": "--synthetic", "statistics": "--statistics"},
        ),
        (
            lambda: engine.emulate(engine.ServeSettings(trace=NOWHERE, rules="all")),
            f"serve --trace {NOWHERE} --prefix-cache all",
            {"rules": "--prefix-cache"},
        ),
        (
            lambda: engine.emulate(engine.ServeSettings(trace=NOWHERE, branching="/nowhere.py")),
            f"serve --trace {NOWHERE} --policy /nowhere.py",
            {"branching": "--policy"},
        ),
        (
            lambda: engine.serve(engine.ServeSettings("tiny-hybrid", dtype="int8")),
            "serve --config tiny-hybrid --dtype int8",
            {"dtype": "--dtype"},
        ),
    ],
)
def test_python_is_told_parameters_and_the_command_line_flags(
    call: Callable[[], object], words: str, flags: dict[str, str]
) -> None:
    with pytest.raises(UserError) as raised:
        call()
    message = str(raised.value)
    assert set(re.findall(r"`(\w+)`", message)) == flags.keys() and "--" not in message
    shown = CliRunner().invoke(app, words.split()).exception
    assert isinstance(shown, UserError)
    assert str(shown) == re.sub(r"`(\w+)`", lambda name: flags[name[1]], message)
