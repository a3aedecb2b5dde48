"""The help of every verb has one example, which its options accept."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from windtunnel.cli.main import app


def verbs(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, one in (inner or {}).items():
        if not getattr(one, "hidden", False):  # another name of a verb
            yield from verbs(f"{path} {name}", one)


VERBS = dict(verbs("windtunnel", typer.main.get_command(app)))


@pytest.mark.parametrize("path", list(VERBS))
def test_every_verb_shows_one_example(path: str) -> None:
    lines = [line.strip() for line in (VERBS[path].help or "").splitlines()]
    (example,) = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
    words = shlex.split(example)
    begin = path.split()
    assert words[: len(begin)] == begin
    known = {option for one in VERBS[path].params for option in (*one.opts, *one.secondary_opts)}
    own = words[len(begin) :]
    script = next((place for place, word in enumerate(own) if word.endswith(".py") or word == "--"), len(own))
    assert {word for word in own[:script] if word.startswith("--")} <= known
