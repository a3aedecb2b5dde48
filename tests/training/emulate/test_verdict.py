"""``--fail-on``: how the command ends for CI, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from capturing import SCRIPTS

import windtunnel as wt
from windtunnel.base.errors import UserError
from windtunnel.cli.main import main
from windtunnel.store.runs import Store
from windtunnel.training.emulate.run import FailOn

TINY = (str(SCRIPTS / "tiny.py"), "plain", "sgd")


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))

    def run(*words: str, script: tuple[str, ...] = TINY) -> Ended:
        given = ["windtunnel", "emulate", "-c", "h100-sxm:1x1", "--no-report", *words, *script]
        monkeypatch.setattr("sys.argv", given)
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Ended(int(end.value.code or 0), *capfd.readouterr())

    return run


NEEDY = (str(SCRIPTS / "needy.py"), "case_optimizer")
OOM = "out of memory: optimizer state of 0.weight asks for 30.0 GiB with "


def test_out_of_memory_is_the_first_line(command) -> None:
    ended = command(script=NEEDY)
    assert ended.status == 0
    assert " ".join(ended.out.split()).startswith(f"✗ {OOM}")
    assert ended.err == ""


def test_out_of_memory_fails_who_asks_for_it(command) -> None:
    ended = command("--json", "--fail-on", "oom", script=NEEDY)
    assert ended.status == 3
    assert ended.err.startswith(f"windtunnel: --fail-on oom: {OOM}") and ended.err.count("\n") == 1
    verdict = json.loads(ended.out)["verdict"]
    assert (verdict["fail_on"], verdict["passed"]) == (["oom"], False)
    assert verdict["reasons"][0].startswith(OOM)
    assert Store.open().get("last").status == "done"


def test_a_job_that_hangs_has_a_status_of_its_own_where_asked(command) -> None:
    lonely = (str(SCRIPTS / "lonely.py"),)
    words = ("-c", "h100-sxm:1x8")
    assert command(*words, "--fail-on", "oom", script=lonely).status == 1
    ended = command(*words, "--fail-on", "hang", script=lonely)
    assert ended.status == 3 and ended.out == ""
    assert ended.err.splitlines()[-1].startswith("windtunnel: --fail-on hang: the job would hang: ")
    assert [run.status for run in Store.open().list()] == ["failed", "failed"]


def test_python_gets_the_run_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    with pytest.raises(wt.VerdictError, match="out of memory") as caught:
        wt.emulate(*NEEDY, cluster="h100-sxm:1x1", report=False, fail_on="oom,hang")
    assert isinstance(caught.value.run, wt.Run) and not caught.value.run.summary.fits
    assert wt.load_run().summary.verdict == caught.value.run.summary.verdict


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["ooms"], "'ooms' is not known; accepted are oom and hang"),
        (["oom,"], "'' is not known"),
    ],
)
def test_what_is_not_known_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        FailOn.parse(given)
