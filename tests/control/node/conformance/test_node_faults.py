"""The demo as a user calls it, and agents whose processes are killed or frozen at any time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from support.node import SCHEDULE, effects, groups, lending, root
from support.waiting import until
from windtunnel.base.errors import HostError
from windtunnel.control.node import Guards, clean, emulate, run
from windtunnel.control.node.live.cpu import NOTE, setting
from windtunnel.store import eventlog

GROUPED = True
MAIN = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "control", "node"]
PARENT = """
import sys, time
from pathlib import Path
from support.node import SCHEDULE, lending
from windtunnel.control.node import run
if __name__ == "__main__":
    with run(*lending((Path(sys.argv[1]), Path(sys.argv[2]))), SCHEDULE, log=Path(sys.argv[3])):
        time.sleep(600)
"""


@root
def test_the_demo_lends_and_leaves_every_quota_as_it_was() -> None:
    done = subprocess.run(
        [*MAIN, "demo", "harvest", "--json", "--seconds", "3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["with"]["restored"] and result["with"]["counts"]["predict"] > 0
    assert result["with"]["lent"] > 0 == result["without"]["lent"]
    assert min(result[arm]["p99"] for arm in ("with", "without")) > 0.001
    for _ in range(2):
        done = subprocess.run([*MAIN, "clean"], capture_output=True, text=True, check=True)
        assert done.stdout == "Nothing to restore\n"


@pytest.mark.parametrize("words", [["demo", "overclock"], ["demo", "harvest", "--seconds", "0"]])
def test_what_is_not_accepted_is_told_in_a_sentence(words: list[str]) -> None:
    done = subprocess.run([*MAIN, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not done.stdout


@root
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_killed_or_frozen_clean_restores(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    with groups(busy=True) as (primary, elastic, folder):
        before, log, failed = setting(folder), tmp_path / "log", False
        try:
            with run(*lending((primary, elastic)), SCHEDULE, log=log) as agent:
                until(lambda: effects(log, "predict"), "a loan")
                for process in draw.sample([agent.model, agent.actuator], draw.choice([1, 2])):
                    os.kill(process.pid, draw.choice([signal.SIGKILL, signal.SIGSTOP]))
                clean()
                assert setting(folder) == before and NOTE not in os.listxattr(folder)
        except HostError:
            failed = True
        assert failed and setting(folder) == before


@root
def test_an_actuator_whose_parent_is_gone_cleans_up(tmp_path: Path) -> None:
    with groups(busy=True) as (primary, elastic, folder):
        before, log = setting(folder), tmp_path / "log"
        program = tmp_path / "parent.py"
        program.write_text(PARENT)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        with subprocess.Popen([sys.executable, program, primary, elastic, log], env=env) as parent:
            until(lambda: effects(log, "predict"), "a loan")
            assert setting(folder) != before
            parent.kill()
        until(lambda: setting(folder) == before, "the quota restored")
        until(lambda: any("counts" in row for row in eventlog.read(log)), "the end of the actuator")


@root
def test_an_agent_is_refused_where_a_killed_one_lent_until_somebody_cleans_up(tmp_path: Path) -> None:
    with groups() as (primary, elastic, folder):
        parts = lending((primary, elastic))
        parts[1].act(None)  # this process lends
        with (
            pytest.raises(HostError, match="control node clean"),
            run(*parts, SCHEDULE, log=tmp_path / "l") as agent,
        ):
            agent.actuator.join(60)
        assert NOTE in os.listxattr(folder)
        assert parts[1].clean_up() == {"restored": True} and parts[1].clean_up() == {"restored": False}


@pytest.mark.parametrize("fault", ["bad data", "broken model", "late model"])
@pytest.mark.parametrize("off", ["validation", "model", "expiry", "actuator"])
def test_each_guard_off_alone_is_never_worse_than_none(fault: str, off: str) -> None:
    guards, none = Guards(**{off: False}), Guards(False, False, False, False)
    partial = emulate("harvest", fault, guards, seconds=60.0)
    assert partial.harm <= emulate("harvest", fault, none, seconds=60.0).harm * 1.05


@pytest.mark.parametrize("pair", combinations(["validation", "model", "expiry", "actuator"], 2))
def test_pairs_of_guards_alone_are_never_worse_than_none(pair: tuple[str, str]) -> None:
    on = dict.fromkeys(("validation", "model", "expiry", "actuator"), False) | dict.fromkeys(pair, True)
    none = Guards(False, False, False, False)
    for fault in ("broken model", "late model"):
        runs = [emulate("harvest", fault, guards, seconds=60.0) for guards in (Guards(**on), none)]
        assert runs[0].harm <= runs[1].harm * 1.05
