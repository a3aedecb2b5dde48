"""Profiles are found, read and written in one way, whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles


def test_the_users_own_goes_before_the_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    shipped = tmp_path / "shipped"
    assert profiles.find("d", shipped) is None
    profiles.save(shipped / "d.json", 1, {})
    assert profiles.find("d", shipped) == shipped / "d.json"
    profiles.save(profiles.own("d"), 1, {})
    assert profiles.find("d", shipped) == profiles.own("d") == tmp_path / "home" / "profiles" / "d.json"


@pytest.mark.parametrize("rows", [None, [], [["mm", 1], ["add", 2]]])
def test_what_is_saved_is_read(tmp_path: Path, rows: list[Any] | None) -> None:
    path = tmp_path / "deep" / "p.json"
    profiles.save(path, 3, {"a": {"b": 1.5}}, None if rows is None else ("rows", rows))
    saved = profiles.read(path, "a thing", 3, lambda content: content)
    assert saved == {"version": 3, "a": {"b": 1.5}} | ({} if rows is None else {"rows": rows})
    if rows:
        assert '["mm",1],\n["add",2]' in path.read_text()  # one a line, so that a difference can be read
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for text in ("", "[]", "{}", json.dumps({"version": 1})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"p\.json: not a thing .*'windtunnel calibrate' wrote"):
            profiles.read(path, "a thing", 1, lambda content: content["b"])
    with pytest.raises(UserError, match="field version is 1, accepted is 2; calibrate again"):
        profiles.read(path, "a thing", 2, lambda content: content)
