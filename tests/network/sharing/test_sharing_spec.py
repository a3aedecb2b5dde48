"""The file of shares: what is wrong with it is told in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windtunnel.base.errors import UserError
from windtunnel.network.sharing.spec import check, limit_of, mark_of, read_spec


def given(**more: Any) -> dict[str, Any]:
    return {"line": "1 Gb/s", "by": "source", "entities": {"a": {"match": "10.0.1.0/24"}}} | more


def entity(**more: Any) -> dict[str, Any]:
    return {"entities": {"a": {"match": "10.0.0.0/24"} | more}}


TWICE = {"a": {"match": "10.0.0.0/24"}, "b": {"match": ["10.0.0.0/24"]}}
WRONG = [
    ({"line": "fast"}, "field line is 'fast', accepted is a positive number of bytes/s"),
    ({"line": "1 kb/s"}, "field line is '1 kb/s', accepted is 1 Mb/s to 1 Tb/s"),
    ({"by": "colour"}, "field by is 'colour', accepted is source, destination, mark or cgroup"),
    ({"entities": {}}, "field entities is {}, accepted is a mapping of names"),
    ({"wait": 1}, "field wait is unknown, accepted are line, by"),
    ({"entities": {"a": {}}}, "field entities.a.match is missing, accepted is a prefix"),
    (entity(wieght=1), "entities.a.wieght is unknown, did you mean weight"),
    (entity(weight=0), "entities.a.weight is 0, accepted is a number greater"),
    (entity(limit=1500), "entities.a.limit is 1500, accepted is bytes, from 128"),
    (entity(feedback="delay"), "is 'delay', accepted is drop or ecn"),
    (entity(match=[]), r"field entities.a.match is \[\], accepted is a prefix"),
    (entity(match="10.0.0.1/24"), "match is '10.0.0.1/24', accepted is a prefix .* without bits"),
    ({"by": "mark"}, "match is '10.0.1.0/24', accepted is a whole number"),
    ({"by": "cgroup", "hook": "ingress"}, "hook is 'ingress' by cgroup, accepted is egress"),
    ({"entities": TWICE}, "entities.b.match is '10.0.0.0/24', which is of a, too; accepted is it once"),
    (entity(rate="2 Gb/s"), r"line is 1.25e\+08 bytes/s, rates sum to 2.5e\+08 .* at most 1.23125e\+08"),
    (entity(rate="1 Mb/s", weight=1), "a weight and a rate, accepted is one"),
    (entity(weight=1e-6) | {"others": {"weight": 1}}, "entities.a gets .* at least 1 Mb/s"),
    (entity(limit="3 GB"), "limit is 3000000000.0, accepted is at most 4 s"),
    (entity(mark_at=9), "mark_at is given, accepted is that with feedback: ecn"),
    ({"entities": {"others": {"match": "::/0"}}}, "an entity is called others, accepted is that as a field"),
    ({"entities": {"a" * 40: {"match": "::/0"}}}, "accepted are names of at most 31 bytes"),
]


@pytest.mark.parametrize(("more", "words"), WRONG)
def test_what_is_wrong_is_told(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"shares.yaml: .*{words}"):
        check(given(**more), "shares.yaml")


def test_a_file_is_read_and_prefixes_may_lie_in_each_other(tmp_path: Path) -> None:
    (tmp_path / "shares.yaml").write_text(
        "line: 10 Gb/s\nby: source\nentities:\n  a: {match: 10.0.0.0/8, weight: 3}\n"
        "  b: {match: [10.1.0.0/16, 'fd00::/64'], feedback: ecn}\nothers: {rate: 1 Gb/s}\n"
    )
    spec = read_spec(tmp_path / "shares.yaml")
    assert [tenant.name for tenant in spec.observation().entities] == ["others", "a", "b"]
    assert limit_of(spec.entities["a"], 1e9) == 2e6 and mark_of(spec.entities["a"], 1e9) is None
    assert mark_of(spec.entities["b"], 1e9) == 5e5
    (tmp_path / "shares.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"a file of shares holds \['a'\], accepted is a mapping"):
        read_spec(tmp_path / "shares.yaml")
