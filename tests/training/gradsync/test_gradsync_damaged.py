"""Files of profiles and plans that were damaged, or made by an attacker: one sentence, whatever they hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_up import profile

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.training.gradsync.files import read
from windtunnel.training.gradsync.model import Plan, Profile
from windtunnel.training.gradsync.policy.plan import make_plan

FEW = profile([1 << 10] * 3, 1e7)
TABLE = replace(FEW.tensors[1], width=8, density=0.1, growth=(1.5, 2.0, 3.0))
MIXED = replace(FEW, tensors=(FEW.tensors[0], TABLE, FEW.tensors[2]))
FILES: dict[type, Any] = {Profile: to_plain(MIXED), Plan: to_plain(make_plan(FEW))}
WORST: dict[type, tuple[tuple[tuple[Any, ...], Any], ...]] = {
    Profile: ((("tensors", 0, "backward"), float("nan")), (("codecs", 0, "points"), [])),
    Plan: ((("hosts",), 0), (("groups",), [])),
}
BAD = st.sampled_from(
    [
        None, True, "", "none", "dragonn:-1", "dragonn:nan", "zen", "a" * 10_000, "\ud800", "\x00", [], {},
        [[]], float("nan"), float("inf"), -1, 0, 1, 2, 1e-320, 1e308, 2**31, 2**63, 10**30, -(10**30),
    ]
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, key))


def checked(kind: type, text: str | bytes, file: Path) -> None:
    """It is read (and a profile planned for) or refused in a sentence; nothing else happens."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    try:
        found = read(file, kind)
        if isinstance(found, Profile):
            names = [name for group in make_plan(found).groups for name in group.tensors]
            assert names == [one.name for one in found.tensors]
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 500


@pytest.mark.parametrize("kind", [Profile, Plan])
def test_a_damaged_file_is_refused_in_a_sentence(
    kind: type, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "file.json"
    whole = FILES[kind]
    spots = [*places(whole)]

    @settings(max_examples=120, deadline=None)
    @given(st.sampled_from(spots), BAD)
    @example(*WORST[kind][0])
    @example(*WORST[kind][1])
    def damaged(at: tuple[Any, ...], bad: Any) -> None:
        value = {"it": copy.deepcopy(whole)}
        one: Any = value
        for key in ("it", *at)[:-1]:
            one = one[key]
        last = ("it", *at)[-1]
        if isinstance(one, dict) or last < len(one):
            one[last] = bad
        checked(kind, json.dumps(value["it"]), file)

    damaged()
    text = json.dumps(whole)
    for cut in range(0, len(text), len(text) // 20):
        checked(kind, text[:cut], file)
    for odd in ("[" * 200_000, '{"a":' * 200_000, "1" * 5000, "", bytes(range(256)), text.encode("utf-16")):
        checked(kind, odd, file)
    with pytest.raises(UserError, match="MiB"):
        read(Path("/dev/zero"), kind)


def test_a_table_among_dense_gradients_of_its_size_has_options_of_its_own() -> None:
    for sizes in (3, 5, 8):
        dense = profile([1 << 10] * sizes, 1e7).tensors
        for place in range(sizes):
            tensors = (*dense[:place], replace(TABLE, name="table"), *dense[place + 1 :])
            plan = make_plan(replace(FEW, tensors=tensors))
            assert [one.tensors for one in plan.groups if one.option.scheme == "sparse"] == [("table",)]
