"""Pages of the site that are made from what stands elsewhere: README, CONTRIBUTING, the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """The pages that have no file in ``docs``."""
    from mkdocs.structure.files import File

    for name, content in {
        "index.md": of_root("README.md"),
        "contributing.md": of_root("CONTRIBUTING.md"),
        "commands.md": commands_page(),
    }.items():
        files.append(File.generated(config, name, content=content))
    return files


def of_root(name: str) -> str:
    """A page of the repository's root, with its links as they are inside ``docs``."""
    text = (ROOT / name).read_text().replace("](docs/", "](")
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](README.md)", "](index.md)")


def commands_page() -> str:
    """Every verb with its arguments and options, from the command line itself."""
    from windtunnel.cli.main import app

    lines = [
        "# Commands and options",
        "",
        "What `windtunnel VERB --help` says of every verb. Exit status: 0 done, 1 the user's program failed,"
        " 2 the user's input is wrong, 130 interrupted.",
    ]
    for path, command in verbs("windtunnel", typer.main.get_command(app)):
        lines += ["", f"{'#' * min(len(path.split()), 3)} {path}", "", prose(command.help or "")]
        rows = [
            row(one) for one in command.params if not getattr(one, "hidden", False) and one.name != "help"
        ]
        if rows:
            lines += ["", "| option | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def verbs(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command below ``command``, groups before their members, with the words that call it."""
    for name, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield f"{path} {name}", one
            yield from verbs(f"{path} {name}", one)


def prose(text: str) -> str:
    """Help as Markdown: its examples as code."""
    clean = inspect.cleandoc(text.replace("\b", ""))
    return re.sub(r"^Examples?: *(.+)$", r"```\n\1\n```", clean, flags=re.MULTILINE)


def row(one: Any) -> str:
    """One argument or option as a line of a table."""
    argument = one.param_type_name == "argument"
    words = ", ".join([*one.opts, *one.secondary_opts])
    value = one.metavar or one.name.upper()
    name = value if argument else words if one.is_flag else f"{words} {one.metavar or 'VALUE'}"
    default = one.default
    shown = "" if default in (None, "", (), [], False) or callable(default) or argument else f"`{default}`"
    meaning = (getattr(one, "help", None) or "").replace("|", r"\|").replace("\n", " ")
    return f"| `{name.replace('|', chr(92) + '|')}` | {shown} | {meaning} |"
