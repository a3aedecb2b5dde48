"""The allow-list as a file; fields and defaults as in `policy.AllowList`:

roots: [5f3c…]                     # public keys of manufacturers, Ed25519
measurements: {kernel: [9a41…], program: [07be…, 11d0…]}
claims: {debug: [0]}               # values that are accepted
least: {counter: 3}                # values at least
tier: tpm                          # simulator or tpm
quote_keys: [77aa…]
pcrs: [c0de…]
"""

from __future__ import annotations

import re
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.trust.attest.policy import TIERS, AllowList

DIGEST = re.compile("[0-9a-f]{64}")


def read_allow_list(path: Path) -> AllowList:
    """The allow-list in the file ``path``.

    Raises:
        UserError: there is no such file, or a field of it is not what it must be.
    """
    try:
        allow = from_plain(AllowList, read_mapping(path, "allow-list"))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}; accepted is an allow-list as docs/trust.md has it") from None
    digests = [*allow.roots, *allow.quote_keys, *allow.pcrs, *sum(allow.measurements.values(), ())]
    for digest in digests:
        if not DIGEST.fullmatch(digest):
            raise UserError(f"{path}: {digest!r} is no digest or key; accepted are 64 hex digits, a to f")
    if allow.tier not in TIERS:
        raise UserError(f"{path}: field tier is {allow.tier!r}, accepted are {' and '.join(TIERS)}")
    return allow
