"""An agent as two processes, its slot, and CPU time that is lent and given back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.node import SCHEDULE, Counting, Noting, effects, groups, lending, root
from support.waiting import until
from windtunnel.base.errors import HostError, UserError
from windtunnel.control.node import Groups, Guards, clean, run
from windtunnel.control.node.agents import Prediction
from windtunnel.control.node.live.agent import PLACE, AgentSlot
from windtunnel.control.node.live.cpu import NOTE, setting
from windtunnel.linux import LinuxError
from windtunnel.linux.processes import descendants
from windtunnel.store import eventlog

GROUPED = True
"""`clean` ends all agents of this host: no other test may run one meanwhile."""


def test_a_slot_gives_the_newest_prediction_whole(tmp_path: Path) -> None:
    writer, reader = (AgentSlot(tmp_path / "slot") for _ in range(2))
    assert reader.read() is None
    for number in range(1, 6):
        writer.write(Prediction(number, number + 0.5, {"cores": [number, None]}))
        assert reader.read() == (number, number + 0.5, {"cores": [number, None]})
    with pytest.raises(UserError, match="accepted are"):
        writer.write(Prediction(6, 0.0, "x" * PLACE))
    assert reader.read() == (5, 5.5, {"cores": [5, None]})


def test_a_flipped_bit_or_half_a_write_is_never_a_prediction_that_was_not_made(tmp_path: Path) -> None:
    slot, written = AgentSlot(tmp_path / "slot"), [Prediction(1, 1.5, [1.25]), Prediction(2, 2.5, [2.25])]
    for prediction in written:
        slot.write(prediction)
    whole = bytes(slot._map[:64])  # number 2 lies in the first place
    results = []
    for bit in range(8 * 34):
        slot._map[bit // 8] ^= 1 << bit % 8
        results.append(slot.read())
        slot._map[:64] = whole
    assert set(map(repr, results)) <= {repr(None), repr(written[0])}
    assert sum(each is None for each in results) >= 200
    slot._map[4:40] = AgentSlot(tmp_path / "other")._map[4:40]  # a new sequence comes first, the sum last
    slot._map[4] = 3
    assert slot.read() is None


def test_the_actuator_takes_the_default_when_the_model_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with run(Counting(), Noting(tmp_path), SCHEDULE, log=log) as agent:
        until(lambda: effects(log, "predict"), "a prediction")
        os.kill(agent.model.pid, signal.SIGKILL)
        agent.model.join()
        since = len(eventlog.read(log))
        until(lambda: len(effects(log, "default", since)) > 1, "defaults after the model was killed")
    assert (tmp_path / "cleaned").exists()
    hold_expiry(log)


def hold_expiry(log: Path) -> None:
    """What was used had not expired."""
    turns = [row for row in eventlog.read(log) if row.get("observation", {}).get("is") == "Turn"]
    used = [row["observation"] for row in turns if row["decision"]["kind"] == "predict"]
    assert used and all(row["now"] < row["expires"] for row in used)


def test_a_stopped_model_a_damaged_slot_and_harm_each_have_their_guard(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with run(Counting(), Noting(tmp_path), SCHEDULE, log=log) as agent:
        until(lambda: effects(log, "predict"), "a prediction")
        os.kill(agent.model.pid, signal.SIGSTOP)
        since = len(eventlog.read(log))
        until(lambda: effects(log, "default", since), "the default while the model stands still")
        os.kill(agent.model.pid, signal.SIGCONT)
        since = len(eventlog.read(log))
        until(lambda: effects(log, "predict", since), "predictions again")
        (tmp_path / "ill").touch()
        until(lambda: effects(log, "mitigate"), "the harm undone")
        (tmp_path / "ill").unlink()
        until(lambda: effects(log, "resume"), "health again")
        os.kill(agent.model.pid, signal.SIGSTOP)
        slot = AgentSlot(agent.slot)
        for place in (12, PLACE + 12):  # of the expiry
            slot._map[place] ^= 4
        assert slot.read() is None
        since = len(eventlog.read(log))
        until(lambda: effects(log, "default", since), "the default instead of a damaged slot")
        os.kill(agent.model.pid, signal.SIGCONT)
    counts = {}
    for row in eventlog.read(log):
        counts |= row.get("counts", {})
    assert counts["mitigate"] == counts["resume"] == 1 and counts["predict"] >= 2
    hold_expiry(log)


def test_the_agent_of_the_page_runs_and_cleans_up_when_its_program_is_killed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "node.md").read_text()
    (code,) = (part.split("```")[0] for part in page.split("```python\n") if "class Workers" in part)
    (tmp_path / "agent.py").write_text(code)
    log, workers = tmp_path / "node.jsonl", tmp_path / "workers"
    with subprocess.Popen([sys.executable, "agent.py"], cwd=tmp_path) as program:
        until(lambda: effects(log, "predict"), "a prediction that is acted on")
        mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in descendants(program.pid))
        (slot,) = set(re.findall(r"/dev/shm/windtunnel-node-.*/slot", mapped))
        program.kill()
    until(lambda: sum("counts" in row for row in eventlog.read(log)) == 2, "both processes to end")
    assert workers.read_text() == "0" and not Path(slot).parent.exists()


@root
def test_quota_and_weight_are_lent_and_given_back(tmp_path: Path) -> None:
    with groups(busy=True) as (primary, elastic, folder):
        before, log = setting(folder), tmp_path / "log"
        with run(*lending((primary, elastic)), SCHEDULE, Guards(), log=log):
            until(lambda: [row for row in effects(log, "predict") if row["lent"] > 0.1], "a loan")
            assert setting(folder) != before
            assert all(row["lent"] <= 1.5 for row in effects(log, "predict")), "more than its own quota"
            with pytest.raises(LinuxError, match="has an agent, or one was killed"):
                Groups(primary, elastic).lend(0.5)
        assert setting(folder) == before and NOTE not in os.listxattr(folder)
        assert clean() == [] and not Groups(primary, elastic).restore()


@root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_clean_restores_after_a_killed_or_frozen_actuator(number: int, tmp_path: Path) -> None:
    with groups() as (primary, elastic, folder):
        before, log = setting(folder), tmp_path / "log"
        with (
            pytest.raises(HostError, match="windtunnel control node clean"),
            run(*lending((primary, elastic)), SCHEDULE, log=log) as agent,
        ):
            until(lambda: effects(log, "default") or effects(log, "predict"), "a first act")
            os.kill(agent.actuator.pid, number)
            if number == signal.SIGKILL:
                agent.actuator.join()
            assert setting(folder) != before
            assert clean() == [str(folder)]
            assert setting(folder) == before
            agent.actuator.join(10)
            assert agent.actuator.exitcode == -signal.SIGKILL  # it can do nothing any more
            assert clean() == []
        assert setting(folder) == before


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        (UserError, LinuxError), match=r"`primary` is .*accepted is the path of a cgroup|cgroup"
    ):
        Groups(Path("no/such"), Path("no/group"))
