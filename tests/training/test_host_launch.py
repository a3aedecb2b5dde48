"""Launched jobs: real supervisor, agents and fork server, scripts without torch; nothing of them is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from host_helpers import alive, finish, here, kinds, knowing, script

from support.strikes import kill_agent, kill_host, kill_worker
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.linux.hosts import own_address
from windtunnel.training import cleanup
from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.spec import WAITS
from windtunnel.training.hosts import lend
from windtunnel.training.launch import launch


def test_a_job_runs_and_ends(go: Any, tmp_path: Path) -> None:
    launched = go("import os, sys; print(os.environ['RANK'], sys.argv[1:])", "--x", per_host=2, spares=1)
    outcome = launched.wait(60)
    assert (outcome.status, set(outcome.results)) == (0, {0, 1, 2, 3})
    lines = (tmp_path / "output").read_text().splitlines()
    assert sorted(lines) == ["0 ['--x']", *(f"[rank {r}] {r} ['--x']" for r in (1, 2, 3))]
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 4
    assert (
        json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["config"]["spares"] == 1
    )


def test_a_job_that_fails_by_itself(go: Any) -> None:
    launched = go(
        "import os; assert os.environ['RANK'] == '0'; __import__('time').sleep(600)",
        max_restarts=1,
    )
    outcome = launched.wait(60)
    assert outcome.status == 1
    assert "by itself 2 times" in outcome.reason
    lost = kinds(launched.events(), "lost")
    assert {event["rank"] for event in lost} == {1}
    assert lost[0]["own"] and "AssertionError" in lost[0]["error"]


def test_each_part_waits_as_it_was_told(go: Any, tmp_path: Path) -> None:
    given = {wait.name: wait.default + 1 for wait in WAITS}
    launched = go("import time; time.sleep(0.3)", deadlines=given)
    assert launched.wait(60).status == 0
    deadlines = asdict(launched._supervisor._settings.deadlines)
    assert deadlines == {wait.name: given[wait.name] for wait in WAITS if wait.who == "supervisor"}
    agent = AgentConfig.read(tmp_path / "run" / "agents" / "host-0.config")
    for who in ("agent", "memory"):
        assert agent.job.waits(who) == {wait.name: given[wait.name] for wait in WAITS if wait.who == who}
    assert [agent.worker[name] for name in ("operation", "generation", "cut")] == [61, 3601, 3]
    checkpoints = agent.job.checkpoints
    assert (checkpoints["patience"], checkpoints["stored"]) == (given["commit"], given["stored"])


BLAMES = """
import os, sys, time
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "0" and (first or sys.argv[1:]):
    print("Warning: something harmless", file=sys.stderr)
    raise RuntimeError("[/x/gloo/gloo/transport/tcp/pair.cc:457] Application timeout caused pair closure")
while first or sys.argv[1:]:
    time.sleep(1)
"""


def test_a_healthy_rank_that_waits_for_a_hung_one_has_not_failed_by_itself(go: Any) -> None:
    """gloo's timeout is grounds to suspect a peer; again and again in vain it ends the job."""
    launched = go(BLAMES, max_restarts=0)
    assert launched.wait(60).status == 0
    (lost,) = kinds(launched.events(), "lost")
    assert not lost["own"] and "pair closure" in lost["error"]


def test_what_is_in_vain_again_and_again_ends(go: Any) -> None:
    outcome = go(BLAMES, "always", max_restarts=0).wait(60)
    assert outcome.status == 1
    assert "waited for each other in vain 4 times" in outcome.reason
    assert "Application timeout caused pair closure" in outcome.reason


def test_what_was_merely_printed_is_no_cause(go: Any) -> None:
    text = "import os, sys; print('harmless', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    launched = go(
        f"import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1': {text}"
    )
    assert launched.wait(60).status == 0
    assert [lost["error"] for lost in kinds(launched.events(), "lost")] == ["killed by SIGKILL"]


def test_a_killed_worker_is_replaced_and_the_others_go_on(go: Any, tmp_path: Path) -> None:
    launched = go(hosts=3)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 3)}
    kill_worker(launched, 1)
    second = {event["rank"]: event["pid"] for event in here(launched, 2, 3)}
    assert (first[0], first[2]) == (second[0], second[2])
    assert first[1] != second[1]
    finish(launched, tmp_path)


def test_a_stopped_worker_is_fenced(go: Any, tmp_path: Path) -> None:
    launched = go(frozen_after=0.5)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 2)}
    kill_worker(launched, 0, signal.SIGSTOP)
    here(launched, 2, 2)
    until(lambda: not alive(first[0]))
    assert kinds(launched.events(), "lost")[0]["evidence"] == "frozen"
    finish(launched, tmp_path)


def test_a_lost_host_is_ordered_anew(go: Any, tmp_path: Path) -> None:
    launched = go()
    here(launched, 1, 2)
    before = launched.places()[1]
    kill_host(launched, 1)
    here(launched, 2, 2)
    after = until(lambda: launched.places().get(1))
    assert after["host"] != before["host"]
    assert not Path(before["memory"]).exists()
    until(lambda: not any(alive(pid) for pid in before["workers"].values()))
    finish(launched, tmp_path)


def test_a_spare_takes_the_place(go: Any, tmp_path: Path) -> None:
    launched = go(spares=1)
    here(launched, 1, 2)
    until(lambda: len(kinds(launched.events(), "host.joined")) == 3)
    kill_agent(launched, 0)
    here(launched, 2, 2)
    assert kinds(launched.events(), "ordered") == []
    finish(launched, tmp_path)


def test_a_job_shrinks(go: Any, tmp_path: Path) -> None:
    launched = go(hosts=3, on_loss="shrink", min_hosts=2)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 3)}
    kill_host(launched, 0)
    second = {event["rank"]: event["pid"] for event in here(launched, 2, 2)}
    assert sorted(second.values()) == sorted((first[1], first[2]))
    assert set(second) == {0, 1}
    finish(launched, tmp_path)


def test_an_exception_in_the_callers_code_ends_everything(go: Any) -> None:
    launched = go()
    here(launched, 1, 2)
    with pytest.raises(ZeroDivisionError), launched:
        raise ZeroDivisionError
    assert cleanup.marked(launched.token) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": 0}, "`hosts` 0: at least 1"),
        ({"per_host": 0}, "`per_host` 0: at least 1"),
        ({"faults": ("kill:host=2,step=1",)}, "places are 0 to 1"),
        ({"faults": ("kill:rank=9,step=1",)}, "ranks are 0 to 1"),
        ({"faults": ("explode",)}, "unknown action"),
        ({"faults": ("down:host=0,step=1",)}, "`network` netns"),
        ({"network": "wifi"}, "accepted are loopback, netns"),
        ({"rate": 1e6}, "netns"),
        ({"lease": 0.0}, "`lease` 0"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        launch(script(tmp_path, ""), **{"hosts": 2, "folder": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


def test_a_script_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        launch(tmp_path / "none.py", hosts=1, folder=tmp_path / "run")


def test_an_agent_that_cannot_begin_ends_the_run(go: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "write", lambda _, path: path.write_text("{}"))
    outcome = go(hosts=1).wait(60)
    assert outcome.status == 1
    assert "ended with status 1 before it joined" in outcome.reason


def test_hosts_that_are_not_ours_join(go: Any, tmp_path: Path) -> None:
    launched = go(hosts=2, listen="127.0.0.1:0")
    code = (
        "import sys; from windtunnel.training.session import lend;"
        "raise SystemExit(lend(sys.argv[1], '', 'rack'))"
    )
    lent = [
        subprocess.Popen([sys.executable, "-c", code, launched._offer.address], env=knowing(launched))
        for _ in range(2)
    ]
    here(launched, 1, 2)
    assert {event["domain"] for event in kinds(launched.events(), "host.joined")} == {"rack"}
    finish(launched, tmp_path)
    assert [process.wait(30) for process in lent] == [0, 0]
    assert not list(cleanup.MEMORY.glob(f"{launched.token}-host*"))


def test_what_a_host_cannot_do_is_said_in_a_sentence(go: Any, tmp_path: Path) -> None:
    launched = go(hosts=1, listen="127.0.0.1:0")
    config = launched._agent_config(0)
    with pytest.raises(UserError, match="the job's launcher is of another version"):
        AgentConfig.of({**json.loads(json.dumps(config.plain())), "more": 1})
    launched._offer._config = lambda: replace(config, run="/proc/none/run")
    with pytest.raises(UserError, match="/proc/none/run: the run's folder cannot be made here"):
        lend(launched._offer.address, launched.keys)
    launched._offer._config = lambda: replace(config, run=str(tmp_path))
    with pytest.raises(UserError, match=r"address '192\.0\.2\.1': peers cannot reach this host there"):
        lend(launched._offer.address, launched.keys, "192.0.2.1")


def test_hosts_are_given_an_address_of_a_launcher_that_listens_at_all_of_its_own(go: Any) -> None:
    given = go(hosts=1, listen="0.0.0.0:0")._agent_config(0)
    assert given.supervisor.rpartition(":")[0] == own_address()
