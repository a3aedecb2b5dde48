"""Tokens of a step: those that several ranks look up together are counted once."""

from __future__ import annotations

import pytest
from capturing import session

from windtunnel.training.emulate.emulation import measure
from windtunnel.training.emulate.policy.classes import slice_world


@pytest.mark.parametrize(("kind", "replicas"), [("group", 2), ("mesh", 2), ("data", 4)])
def test_tokens_are_counted_once_where_ranks_share_them(kind: str, replicas: int) -> None:
    with session("tokens.py", kind, cluster="h100-sxm:1x4") as one:
        classes = slice_world(one.capture, 4, [0])
    assert measure(classes).tokens == replicas * 3 * 10
