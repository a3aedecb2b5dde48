"""``windtunnel train`` and ``host``: wrong words in one sentence, real runs and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from host_helpers import environment, script
from typer.testing import CliRunner

from support import quick
from support.quick import windtunnel
from support.small_disk import small_disk
from support.waiting import gone, until
from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.training.checkpoint.live import slot, storage
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.elastic.policy.state import Deadlines
from windtunnel.training.elastic.spec import WAITS

WINDTUNNEL = Path(sys.executable).parent / "windtunnel"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "eager"], "--mode eager: accepted are blocking, concurrent, idle"),
        (["--on-loss", "cry"], "--on-loss cry: accepted are replace, shrink, restart"),
        (["--placement", "stack"], "--placement stack: accepted are group, ring, mixed, domains"),
        (["--network", "wifi"], "--network wifi"),
        (["--copies", "3", "--hosts", "2"], "--copies 3: accepted are 1 to 2"),
        (["--min-hosts", "3", "--hosts", "2"], "--min-hosts 3: more than --hosts 2"),
        (["--rate", "fast", "--network", "netns"], "--rate fast: accepted is a rate such as"),
        (["--rate", "1Gbit"], "give --network netns"),
        (["--domains", "a,b,c", "--hosts", "2"], "3 domains for 2 hosts"),
        (["--domains", ",".join(["rack"] * 60), "--hosts", "2"], "60 domains for 2 hosts"),
        (["--inject", "kill:host=7,step=1"], "host=7"),
        (["--hosts", "3", "--inject", "kill:host=3,step=1"], "host=3, but places are 0 to 2"),
        (["--inject", "bang"], "unknown action"),
        (["--external-hosts"], "give --listen HOST:PORT"),
        (["--on", "ssh"], "--on ssh: accepted are ray, ray://HOST:PORT, slurm, kubernetes"),
        (["--on", "kubernetes"], "--image is missing: it is given with --on kubernetes alone"),
        (["--on", "ray", "--image", "x"], "--image x: it is given with --on kubernetes alone"),
        (["--on", "ray", "--network", "netns"], "--network netns: emulated hosts alone have one"),
        (["--external-hosts", "--listen", "here"], "accepted is HOST:PORT"),
        (["--timeout", "0"], "--timeout 0"),
        (["--preload", "torch,nothing.at.all"], "preload nothing.at.all: there is no such module"),
        (["--lease", "0"], "--lease 0: it must be more than 0"),
        (["--timeout", "inf"], "--timeout inf: it must be more than 0 seconds, at most 1e+07"),
        (["--lease", "nan"], "--lease nan: it must be more than 0 seconds, at most 1e+07"),
        (["--hosts", "3", "--placement", "group"], "2 does not divide 3"),
        (["--persist", "/proc/none"], "--persist /proc/none: nothing can be written there"),
        (["--persist", "nothing://x"], "Protocol not known"),
        (["--on-no-checkpoint", "hope"], "--on-no-checkpoint hope: accepted are fail, restart"),
        (["--resume", "none"], "'none' is not a run"),
        (["--resume", "last"], "there is no last one"),
        (["--resume", "last", "--hosts", "3"], "--hosts is that of the run and cannot be given"),
        (["--resume", "last", "train.py"], "SCRIPT is that of the run and cannot be given"),
    ],
)
def test_wrong_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    trains = [] if "--resume" in words else [str(script(tmp_path, ""))]
    refusal = CliRunner().invoke(app, ["train", *words, *trains])
    assert isinstance(refusal.exception, UserError), refusal.output
    assert said in str(refusal.exception)
    assert "\n" not in str(refusal.exception)


@pytest.mark.parametrize("words", [["--hosts", "0"], ["--slots", "1"], ["--orphan-after", "-1"]])
def test_a_number_out_of_its_range(tmp_path: Path, words: list[str]) -> None:
    refusal = CliRunner().invoke(app, ["train", *words, str(script(tmp_path, ""))])
    assert refusal.exit_code == 2 and words[0] in refusal.output


@pytest.mark.parametrize("text", ["import os\ndef f(:\n    pass\n", "x = 1\0"])
def test_a_script_that_is_not_python_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    path = script(tmp_path, text)
    refusal = CliRunner().invoke(app, ["train", "--hosts", "2", str(path)])
    assert isinstance(refusal.exception, UserError)
    assert str(refusal.exception).startswith(str(path))
    assert "no Python that can be run" in str(refusal.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stroe: 5", "there is no deadline 'stroe'; known are grace"),
        ("hosts: soon", "hosts is 'soon'; a number of seconds above 0"),
        ("hosts: 0", "hosts is 0; a number"),
        ("end: .inf", "end is inf; a number"),
        ("cut: true", "cut is True; a number"),
        ("- hosts", "lines of a name and seconds"),
        ("hosts: 1\nhosts: 2", "given twice"),
    ],
)
def test_wrong_deadlines(tmp_path: Path, text: str, said: str) -> None:
    path = script(tmp_path, text, "deadlines.yaml")
    refusal = CliRunner().invoke(app, ["train", "--deadlines", str(path), str(script(tmp_path, ""))])
    assert isinstance(refusal.exception, UserError)
    assert said in str(refusal.exception)


def test_every_deadline_of_the_supervisor_has_a_line() -> None:
    assert {wait.name for wait in WAITS if wait.who == "supervisor"} == {
        field.name for field in fields(Deadlines)
    }


def test_storage_of_another_run_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    url = tmp_path / "stored"
    data = memoryview(b"state")
    shard = Shard("rank0", 4, 1, False, 1, "l", len(data), slot.checksum_of(data))
    storage.complete_step(str(url), [storage.write_shard(str(url), shard, data)], {})
    refusal = CliRunner().invoke(app, ["train", "--persist", str(url), str(script(tmp_path, ""))])
    assert isinstance(refusal.exception, UserError)
    assert "step 4 of another run is in it; storage without checkpoints" in str(refusal.exception)


def test_an_option_that_is_not_there(tmp_path: Path) -> None:
    refusal = CliRunner().invoke(app, ["train", "--run_job", str(script(tmp_path, ""))])
    assert refusal.exit_code == 2


def test_the_options_of_a_host_stand_anywhere() -> None:
    for words in (["127.0.0.1:1", "--address", "127.0.0.1"], ["--address", "127.0.0.1", "127.0.0.1:1"]):
        refusal = CliRunner().invoke(app, ["host", *words])
        assert str(refusal.exception).startswith("host 127.0.0.1:1: ")


def test_a_host_without_a_launcher() -> None:
    for address in ("nowhere", "127.0.0.1:1"):
        refusal = CliRunner().invoke(app, ["host", address])
        assert isinstance(refusal.exception, UserError)


def test_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    refusal = CliRunner().invoke(app, ["train", "--out", str(tmp_path), str(script(tmp_path, ""))])
    assert isinstance(refusal.exception, UserError)
    assert "a new folder" in str(refusal.exception)


TRAINS = """
import os, sys, torch, torch.distributed as dist
from windtunnel.training.elastic.live.run import run
assert sys.argv[1:] == ["--hosts", "7"], sys.argv
def train(job):
    for step in range(6):
        total = torch.ones(1)
        dist.all_reduce(total)
        job.agree(f"step {step}")
        if job.rank == 0: print("step", step, flush=True)
        job.step(step, loss=float(total))
    return os.environ["WINDTUNNEL_CHECKPOINT"]
run(train, timeout=30)
"""


@pytest.mark.slow
def test_a_run_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own options reach it; a host is lost; the run says so and ends well."""
    command = [str(WINDTUNNEL), "train", "--hosts", "2", "--inject", "stop:rank=0,step=3", "--json"]
    command += ["--copies", "2", "--mode", "blocking", str(script(tmp_path, TRAINS)), "--hosts", "7"]
    env = environment() | {"WINDTUNNEL_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step 3" in done.stderr.splitlines()
    summary = json.loads(done.stdout)  # nothing else is there
    assert summary["status"] == 0
    assert [recovery["failure"] for recovery in summary["recoveries"]] == ["stop:rank=0,step=3"]
    settings = {"copies": 2, "placement": "mixed", "mode": "blocking", "every": 1}
    assert settings.items() <= json.loads(summary["results"]["0"]).items()
    assert json.loads((Path(summary["directory"]) / "summary.json").read_text()) == summary
    for said in ("injected: stop:rank=0,step=3", "lost rank 0", "generation 2", "(measured)", "Goodput"):
        assert said in done.stderr
    assert Path(summary["directory"]).parent == tmp_path / "home" / "runs"
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    assert "training.elastic" in CliRunner().invoke(app, ["runs", "list"]).output


FILLS = """
import contextlib, os, sys, time, torch
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import run
disk, full = sys.argv[1], [int(step) for step in sys.argv[2:]]
def train(job):
    state = {"weight": torch.zeros(100_000)}
    checkpointer = PeerCheckpointer(job, persist=disk + "/stored", persist_every=1, copies=1)
    for step in range(checkpointer.restore(state), 3):
        while step and not job.stored(step - 1):
            time.sleep(0.01)
        if step in full:
            with open(disk + "/filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        elif os.path.exists(disk + "/filler"):
            os.remove(disk + "/filler")
        state["weight"].normal_()
        checkpointer.step(step, state)
        job.step(step)
    checkpointer.close()
run(train)
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(("full", "status", "durable"), [((1,), 0, [0, 2]), ((1, 2), 3, [0])])
def test_storage_that_is_full(tmp_path: Path, full: tuple[int, ...], status: int, durable: list[int]) -> None:
    """A checkpoint that was wanted and is not durable is named; where it is the last one the run ends by
    what was not reached."""
    words = [str(script(tmp_path, FILLS)), str(tmp_path / "at"), *map(str, full)]
    with small_disk(tmp_path, 16 << 20, "-b", "4096"):
        done = windtunnel("train", "--out", tmp_path / "out", "--json", *words)
    assert done.returncode == status, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["goodput"]["steps"]) == (status, 3)
    assert summary["stored"] == {"wanted": [0, 1, 2], "durable": durable}
    assert "step 1 is not in storage: it is not written to" in done.stderr
    lost = f"{len(full)} of 3 checkpoints due to storage are not there: step"
    assert lost in done.stderr
    last = "windtunnel: the job ended: step 2, the last checkpoint that was due to storage, is not there: "
    assert (last in done.stderr) == (status == 3) == ("No space left" in done.stderr.splitlines()[-1])


PLAIN = """
import torch, torch.distributed as dist, os
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
print("sum", int(total), flush=True)
dist.barrier()
"""


@pytest.mark.slow
def test_a_torchrun_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    words = ["train", "--hosts", "2", "--out", tmp_path / "out"]
    done = windtunnel(*words, script(tmp_path, PLAIN))
    assert done.returncode == 0, done.stderr
    assert "sum 2" in done.stdout.splitlines()
    assert "lost rank 1: killed by SIGKILL" in done.stderr


@pytest.mark.slow
def test_a_run_that_fails(tmp_path: Path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\ntime.sleep(600)"
    words = ["train", "--hosts", "2", "--max-restarts", "0", "--out", tmp_path / "out", "--json"]
    done = windtunnel(*words, script(tmp_path, "print('a line of the program')\n" + text))
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["status"] == 1 and "ended by itself" in summary["reason"]
    last = done.stderr.splitlines()
    assert last[-1].startswith("windtunnel: the job failed: the program ended by itself once")
    assert "ValueError: boom" in last[-2]
    assert "[rank 1] ValueError: boom" in last


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_interrupted(tmp_path: Path, number: int) -> None:
    text = "import os, time\nprint('up', os.getpid(), flush=True)\ntime.sleep(600)"
    words = ["train", "--out", tmp_path / "out", script(tmp_path, text)]
    said = tmp_path / "said"
    with (tmp_path / "output").open("wb") as output, said.open("wb") as errors:
        process = quick.started(*words, stdout=output, stderr=errors, start_new_session=True)
    pid = int(until(lambda: (tmp_path / "output").read_text().partition("up ")[2], 100))
    os.kill(process.pid, number)
    os.kill(process.pid, number)  # an impatient user
    assert process.wait(60) == 130
    assert "interrupted" in said.read_text()
    assert "Traceback" not in said.read_text()
    assert gone(pid)


@pytest.mark.slow
def test_a_run_under_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    """SIGHUP goes to all that the terminal started: to the launcher, the supervisor, agents and trainers."""
    text = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)"
    command = ["nohup", str(WINDTUNNEL), "train", "--out", "out", str(script(tmp_path, text))]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True, cwd=tmp_path
        )
    until(lambda: "up" in (tmp_path / "output").read_text().split(), 100)
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == process.pid or os.getpgid(pid) == process.pid:
                os.kill(pid, signal.SIGHUP)
    (tmp_path / "go").touch()
    assert process.wait(60) == 0, (tmp_path / "output").read_text()


HANGS = """
import torch, torch.distributed as dist
from windtunnel.training.elastic import run
def train(job):
    for step in range(10):
        if job.rank or step != 3:
            dist.all_reduce(torch.ones(1))
        job.step(step)
run(train)
"""


@pytest.mark.slow
def test_a_program_that_waits_for_itself(tmp_path: Path) -> None:
    """One rank leaves a collective out: steps that are done again are no progress, so it ends, and says
    why."""
    words = ["train", "--hosts", "2", "--timeout", "2", "--out", tmp_path / "out"]
    done = windtunnel(*words, script(tmp_path, HANGS))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "waited for each other in vain 4 times" in last
    assert "rank 1: RuntimeError: Timed out waiting 2000ms" in last  # not rank 0, which waits at its end
