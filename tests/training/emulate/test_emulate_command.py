"""How the command ends for CI (``--fail-on``), and what it says; and ``-m``: a program as a module, as
``python -m`` runs it."""

from __future__ import annotations

import json
import textwrap
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
    ended = command("--json", "--fail-on", "slower:0%,oom", "--baseline", "last", script=NEEDY)
    assert ended.status == 2 and "the store is empty" in ended.err
    ended = command("--json", "--fail-on", "oom", script=NEEDY)
    assert ended.status == 3
    assert ended.err.startswith(f"windtunnel: --fail-on oom: {OOM}") and ended.err.count("\n") == 1
    verdict = json.loads(ended.out)["verdict"]
    assert (verdict["fail_on"], verdict["passed"], verdict["baseline"]) == (["oom"], False, None)
    assert verdict["reasons"][0].startswith(OOM)
    assert Store.open().get("last").status == "done"


def test_a_job_that_gets_slower_fails(command, tmp_path: Path) -> None:
    none = command("--fail-on", "slower:10%")
    assert none.status == 2 and none.out == ""
    assert none.err.startswith("windtunnel: --fail-on slower: the store has no run of this script")
    assert "give one by --baseline, a run or" in none.err
    assert Store.open().list() == []
    first = command("--json")
    assert (first.status, json.loads(first.out)["verdict"]) == (0, None)
    baseline = json.loads(first.out)
    alike = command("--json", "--fail-on", "slower:10%")
    assert alike.status == 0
    assert json.loads(alike.out)["verdict"]["baseline"] == {
        "name": baseline["run_id"],
        "iteration_time_s": baseline["iteration_time_s"],
    }
    # A job under other conditions has no baseline of itself, and one that is named serves.
    slow = ("--slow", "rank=0:100", "--fail-on", "slower:10%", "--fail-on", "oom")
    assert command(*slow).status == 2
    slower = command(*slow, "--baseline", baseline["run_id"])
    assert slower.status == 3
    said = slower.err.splitlines()[-1]
    assert said.startswith("windtunnel: --fail-on slower:10%,oom: an iteration takes")
    assert f"of {baseline['run_id']}, where 10.0 % is allowed" in said
    # What failed is no baseline for the next one, and what ran under a protection is none for one without.
    assert command(*slow).status == 2
    assert command("--confidential", "h100-cc").status == 0
    other = command("--json", "--fail-on", "slower:10%")
    assert json.loads(other.out)["verdict"]["baseline"]["name"] == json.loads(alike.out)["run_id"]
    faster = tmp_path / "before.json"
    faster.write_text(json.dumps(baseline | {"iteration_time_s": baseline["iteration_time_s"] / 1.2}))
    ended = command("--fail-on", "slower:10%", "--baseline", str(faster))
    assert ended.status == 3 and "20.0 % longer than the" in ended.err and str(faster) in ended.err
    assert command("--fail-on", "slower:25%", "--baseline", str(faster)).status == 0


def test_settings_of_the_allocator_come_from_the_environment(command, monkeypatch) -> None:
    conf = "garbage_collection_threshold:0.8"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", conf)
    said = json.loads(command("--json").out)
    assert said["command"]["options"]["alloc_conf"] == conf
    assert [text for text in said["warnings"] if text.startswith("garbage_collection_threshold does nothing")]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"{conf},per_process_memory_fraction:0.5")
    limited = json.loads(command("--json").out)
    assert not any("garbage" in text for text in limited["warnings"])
    (rank,) = limited["ranks"]
    assert rank["headroom_bytes"] == rank["memory_bytes"] / 2 - rank["first_step_peak_reserved_bytes"]


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
        (["ooms"], "'ooms' is not known; accepted are oom, hang and slower:10%"),
        (["slower"], "'slower' is not known"),
        (["slower:-3%"], "'slower:-3%' is not known"),
        (["slower:1.3s"], "'slower:1.3s' is not known"),
        (["oom,"], "'' is not known"),
        (["slower:1%,slower:2%"], "slower is given twice"),
    ],
)
def test_what_is_not_known_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        FailOn.parse(given)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "has no time of an iteration"),
        ('{"iteration_time_s": 0}', "has no time of an iteration"),
        ('{"iteration_time_s": NaN}', "has no time of an iteration"),
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "summary.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=said):
        FailOn.parse("slower:5%").baseline(str(file), {}, Store.open(f"sqlite:///{tmp_path}/runs.db"))


def test_a_baseline_that_nothing_is_compared_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is compared with it"):
        FailOn.parse("oom").baseline("last", {}, Store.open(f"sqlite:///{tmp_path}/runs.db"))


TRAIN = """
    import os, sys
    import torch
    {extra}
    def main():
        print(sys.argv, file=open("said", "w"))
        assert sys.path[0] == os.getcwd() and sys.modules["__main__"].__file__ == __file__
        model = torch.nn.Linear(int(sys.argv[2]), 8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(4, int(sys.argv[2]), device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that cannot be imported but by the ranks: importing them here fails."""
    monkeypatch.chdir(tmp_path)
    files = {
        "plain.py": TRAIN.format(extra=""),
        "beside.py": "raise_nothing = True",
        "pkg/__init__.py": "import os\nassert os.environ['RANK']",
        "pkg/train.py": TRAIN.format(extra="from .other import NUMBER; from beside import raise_nothing"),
        "pkg/other.py": "NUMBER = 3",
        "runs/__init__.py": "",
        "runs/__main__.py": TRAIN.format(extra="from . import __name__ as name; assert name == 'runs'"),
        "spaces/train.py": TRAIN.format(extra=""),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("plain", "plain.py"),
        ("pkg.train", "pkg/train.py"),
        ("runs", "runs/__main__.py"),
        ("spaces.train", "spaces/train.py"),
    ],
)
def test_a_module_runs_as_python_runs_it(command, folder: Path, module: str, file: str) -> None:
    ended = command("--json", "-m", module, "--size", "16", script=())
    assert ended.status == 0, ended.err
    summary = json.loads(ended.out)
    assert summary["command"]["script"] == f"-m {module}"
    assert summary["command"]["args"] == ["--size", "16"]
    assert (folder / "said").read_text() == f"{[str(folder / file), '--size', '16']}\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("nowhere", "there is no module 'nowhere' to be imported from"),
        ("pkg.nowhere", "there is no module 'pkg.nowhere'"),
        ("plain.train", "'plain' is not a package, so it has no 'plain.train'"),
        ("pkg", "'pkg' is a package without a __main__.py, which cannot be run"),
        ("spaces", "'spaces' is a package without a __main__.py, which cannot be run"),
        ("plain.py", "'plain.py' is not the name of a module (give its name, not its file)"),
        ("../plain", "'../plain' is not the name of a module"),
        ("", "'' is not the name of a module"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_no_module_is_refused_in_one_sentence(command, module: str, said: str) -> None:
    ended = command("-m", module, script=())
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("windtunnel: -m: ") and said in ended.err
