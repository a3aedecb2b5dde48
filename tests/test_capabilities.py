"""The table of capabilities is true, and the README shows it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.capabilities import CAPABILITIES, find, markdown

ROOT = Path(__file__).parent.parent


def test_every_line_names_what_there_is() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for capability in CAPABILITIES:
        assert (ROOT / "docs" / f"{capability.page}.md").exists()
        assert f"\n{capability.extra} = [" in declared
        assert all(find_spec(f"windtunnel.cli.{verb}") for verb in capability.verbs)
        assert bool(find_spec(f"{capability.package}.calibrate")) == capability.calibrates
        assert capability.pricing is None or find_spec(capability.pricing)


def test_the_readme_shows_the_table() -> None:
    shown = (ROOT / "README.md").read_text().split("<!-- capabilities -->\n")[1].split("\n<!-- end -->")[0]
    assert shown == markdown(), "write what windtunnel.capabilities.markdown() gives into README.md"


def test_an_unknown_name_is_told_with_what_is_accepted() -> None:
    with pytest.raises(
        UserError, match=r"replay: capability 'training\.x' is unknown; accepted are training"
    ):
        find("training.x", who="replay")
    with pytest.raises(UserError, match=r"training\.goodput has no live; it has twin"):
        find("training.goodput", who="x").room("live")
