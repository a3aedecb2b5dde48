"""The list of attacks, in one sandbox beside another, before and after a restore: all are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.sandbox import attacks
from conformance.sandbox.attack_list import ATTACKS, Attack

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("attacks")]

Outcomes = dict[str, list[attacks.Outcome]]


@pytest.fixture(scope="module")
def outcomes(host: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    before, after = attacks.twice(host, tmp_path_factory.mktemp("attacks"))
    return {"before": before, "after": after}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_it_is_refused(outcomes: Outcomes, attack: Attack, when: str) -> None:
    tries = [outcome for outcome in outcomes[when] if outcome.name == attack.name]
    assert sorted(outcome.user for outcome in tries) == sorted(attack.users)
    assert not [outcome for outcome in tries if not outcome.refused], tries


def test_the_list_is_as_long_as_it_says() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60
    assert {attack.check for attack in ATTACKS if attack.check} == attacks.CHECKS.keys()


def test_an_attack_that_succeeds_or_proves_nothing_is_told(tmp_path: Path) -> None:
    """The same program outside of any sandbox, where nothing is refused."""
    tried = [
        Attack("reaches", "return secret_of('')"),
        Attack("refused", "raise OSError(errno.EPERM, 'no')"),
        Attack("wrong argument", "call(number_of(41, 198), -1, -1, -1)"),
        Attack("wrong program", "return nothing_of_that_name"),
        Attack("dies", "os.kill(os.getpid(), 9)"),
        Attack("may die", "os.kill(os.getpid(), 9)", killed=True),
    ]
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    given = tmp_path / "given.json"
    given.write_text(
        json.dumps({"attacks": [vars(attack) for attack in tried], "names": {"SECRET": str(secret)}})
    )
    done = subprocess.run(
        [sys.executable, attacks.INSIDE, given], capture_output=True, check=True, cwd=os.sep
    )
    tries = [attacks.Outcome(**fields) for fields in json.loads(done.stdout)]
    assert [(outcome.reached, outcome.refused) for outcome in tries] == [
        ("of the host", ""), ("", "EPERM"), ("", ""), ("", ""), ("", ""), ("", "killed by signal 9")
    ]  # fmt: skip
    assert [outcome.broken[:9] for outcome in tries] == ["", "", "EINVAL", "NameError", "killed by", ""]
