"""The help of every verb has one example, which its options accept."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from windtunnel.cli.main import app, main


def verbs(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, member in (inner or {}).items():
        if not getattr(member, "hidden", False):  # another name of a verb
            yield from verbs(f"{path} {name}", member)


VERBS = dict(verbs("windtunnel", typer.main.get_command(app)))


@pytest.mark.parametrize("path", list(VERBS))
def test_every_verb_shows_one_example(path: str) -> None:
    lines = [line.strip() for line in (VERBS[path].help or "").splitlines()]
    (example,) = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
    words = shlex.split(example)
    begin = path.split()
    assert words[: len(begin)] == begin
    known = {
        option for parameter in VERBS[path].params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    own = words[len(begin) :]
    script = next((place for place, word in enumerate(own) if word.endswith(".py") or word == "--"), len(own))
    assert {word for word in own[:script] if word.startswith("--")} <= known


def groups(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if getattr(command, "commands", None) is not None:
        yield path, command
        for name, member in command.commands.items():
            yield from groups(f"{path} {name}", member)


ALL = VERBS | dict(groups("windtunnel", typer.main.get_command(app)))


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("path", list(ALL))
def test_help_breaks_no_word_and_cuts_no_name(path: str, columns: int) -> None:
    _, *words = path.split()
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=columns, prog_name="windtunnel")
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= columns
    known = set(shown.output.split())
    command = ALL[path]
    texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
    options = [
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    ]
    said = {word for text in texts if text for word in text.split()}
    assert said <= known | {word.removesuffix(".") for word in known}, said - known
    assert {name for name in options if name.startswith("-")} <= {word.strip(",") for word in known}
    for name, member in getattr(command, "commands", {}).items():
        first = (member.help or "").split("\n\n")[0].split(". ")[0].split()
        assert member.hidden or {name, *(word.removesuffix(".") for word in first)} <= {
            word.removesuffix(".") for word in known
        }


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        ("serve --config tiny-hybrid", "windtunnel.serving.engine.live.serve", "serve"),
        ("ingest demo", "windtunnel.data.ingest.live.demo", "data"),
        ("network run jobs.yaml", "windtunnel.network.scenario", "network"),
    ],
)
def test_a_package_that_is_not_installed_is_one_sentence(
    words: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where only another extra was installed: the module is there, what it stands on is not."""

    class Absent:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == module:
                raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["windtunnel", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert "'uvicorn' is not installed" in message and f"'windtunnel[{extra}]'" in message
