"""YAML as users' files are read: nothing that was written is silently dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from windtunnel.base.errors import UserError


class StrictLoader(yaml.SafeLoader):
    """YAML in which a field given twice is an error: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"field {key.value} is given twice", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, what: str, accepted: str) -> Any:
    """The document in ``path``, which should be ``what``; ``accepted`` where there is no file.

    Raises:
        UserError: there is no such file, it cannot be read, or it is no YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file, accepted is {accepted}") from None
    except (OSError, ValueError) as error:
        # any other ValueError: a path with a NUL in it, a date that is none
        text = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        reason = error.strerror if isinstance(error, OSError) else text
        raise UserError(f"{path}: cannot be read ({reason}), accepted is a readable {what}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{at}: not valid YAML ({error.problem}), accepted is a {what}") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not valid YAML ({reason}), accepted is a {what}") from None


def read_mapping(path: Path, what: str) -> dict[Any, Any]:
    """The fields in ``path``, which should be a ``what``.

    Raises:
        UserError: as of `read_yaml`, or it holds something else.
    """
    document = read_yaml(path, f"{what} (YAML)", f"a {what} (YAML)")
    if not isinstance(document, dict):
        raise UserError(f"{path}: a {what} holds {document!r}, accepted is a mapping of fields")
    return document
