"""Files of profiles and plans that were damaged, or made by an attacker: one sentence, whatever they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import profile

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.files import read, write
from windtunnel.training.gradsync.model import SyncPlan, SyncProfile
from windtunnel.training.gradsync.policy.plan import make_plan

FEW = profile([1 << 10] * 3, 1e7)
BAD = (None, True, "", "none", "dragonn:-1", "\ud800", "\x00", [], {}, float("nan"), float("inf"), -1, 2**63)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every field and element, as its holder and its key there."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(inner)


@pytest.mark.parametrize("value", [FEW, make_plan(FEW)])
def test_a_damaged_file_is_refused_in_a_sentence(value: SyncProfile | SyncPlan, tmp_path: Path) -> None:
    file, kind = tmp_path / "file.json", type(value)
    write(file, value)
    assert read(file, kind) == value
    text = file.read_text()

    def refused(content: str | bytes) -> None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        with pytest.raises(UserError) as error:
            read(file, kind)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500

    whole = json.loads(text)
    for turn, (holder, key) in enumerate(places(whole)):
        was, holder[key] = holder[key], BAD[turn % len(BAD)]
        if was != holder[key]:
            refused(json.dumps(whole))
        holder[key] = was
    for cut in range(0, len(text) - 1, len(text) // 20):
        refused(text[:cut])
    for odd in (
        text.replace('"version":3', '"version":2'),
        "[" * 200_000,
        '{"a":' * 200_000,
        "1" * 5000,
        "",
        bytes(range(256)),
    ):
        refused(odd)
