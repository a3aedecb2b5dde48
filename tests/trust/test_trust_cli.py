"""``windtunnel trust``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli.main import app
from windtunnel.trust.shield.live import memory


def said(*words: str) -> str:
    return CliRunner().invoke(app, ["trust", *words], catch_exceptions=False).output


def test_all_modes_are_attacked_and_the_control_fails() -> None:
    rows = json.loads(said("attack", "--mode", "all", "--json"))
    assert [*rows] == ["mac", "versions", "tree"]
    assert [name for name, detected in rows["mac"].items() if not detected] == ["replay", "rollback"]
    assert all([*rows["versions"].values(), *rows["tree"].values()])
    shown = said("attack", "--mode", "all").splitlines()
    assert [line.partition(";")[0] for line in shown] == [
        "mac: undetected replay, rollback", "versions: undetected none", "tree: undetected none"
    ]  # fmt: skip


def test_a_control_that_does_not_fail_and_a_mode_that_does_are_status_3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(memory, "ATTACKS", {"honest": memory.ATTACKS["honest"]})
        with pytest.raises(LessError, match="mac does not find out: nothing"):
            said("attack", "--mode", "mac")
    monkeypatch.setattr(memory, "ATTACKS", {"none": memory.ATTACKS["honest"]})
    with pytest.raises(LessError, match="tree does not find out: none"):
        said("attack", "--mode", "tree")


def test_the_demonstration_refuses_all_attacks() -> None:
    rows = {row["attack"]: row for row in json.loads(said("attest", "--demo", "--json"))}
    assert rows["none"] == {"attack": "none", "refused": False, "failing": [], "sum": 6}
    failing = {name: row["failing"] for name, row in rows.items() if row["refused"]}
    assert failing == {
        "flip": ["signature"], "replay": ["signature"], "reflect": ["M2.label"], "record": ["record.tag"],
        "program": ["loaded"],
    }  # fmt: skip


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(UserError, match="mode 'schedule' is unknown; accepted are mac, versions, tree"):
        said("attack", "--mode", "schedule")
    with pytest.raises(UserError, match="give --demo"):
        said("attest")
