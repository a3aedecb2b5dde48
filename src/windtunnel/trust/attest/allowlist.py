"""The allow-list as a YAML file: the fields of `policy.AllowList`, of which two are needed."""

from __future__ import annotations

import re
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.trust.attest.policy import AllowList


def read_allow_list(path: Path) -> AllowList:
    """The allow-list in the file ``path``. Raises UserError: there is none, or a field of it is wrong."""
    try:
        allow = from_plain(AllowList, read_mapping(path, "allow-list"))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}; accepted is an allow-list as docs/trust.md has it") from None
    for digest in (*allow.roots, *sum(allow.measurements.values(), ())):
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UserError(f"{path}: {digest!r} is no digest or key; accepted are 64 hex digits, 0 to f")
    return allow
