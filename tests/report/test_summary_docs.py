"""docs/summary.md and what the report reads speak of the same fields."""

import re
from pathlib import Path

from report_examples import summary

from windtunnel.base import ranges

PAGE = (Path(__file__).parents[2] / "docs" / "summary.md").read_text(encoding="utf-8")


def _documented() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M):
        found[title.strip("`")] = set(re.findall(r"^\| `([^`]+)` \|", body, re.M))
    return found


def test_every_field_is_documented_and_no_other() -> None:
    known, documented = summary(), _documented()
    assert documented["Top level"] == set(known)
    for name in ("versions", "command", "cluster", "replay"):
        assert documented[name] == set(known[name])
    for name in ("waits", "ranks", "collectives", "operators"):
        assert documented[name] == set(known[name][0])
    assert documented["oom"] == next(set(one["oom"]) for one in known["ranks"] if one["oom"])
    kinds = {re.sub(":.*", ":<label>", key) for key in known["critical_path"]}
    assert kinds <= documented["critical_path"]
    assert set(known["provenance"].values()) <= documented["provenance"]


def test_the_example_keeps_the_promises_of_the_page() -> None:
    known = summary()
    assert abs(sum(known["critical_path"].values()) - known["iteration_time_s"]) < 1e-12
    members = [rank for one in known["ranks"] for rank in ranges.read(one["members"])]
    assert sorted(members) == list(range(known["world_size"]))
