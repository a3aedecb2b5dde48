"""``windtunnel gradsync``: a script's plan before any run, its reasons, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_up import profile
from typer.testing import CliRunner

from support.quick import windtunnel
from windtunnel.advise import advise
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain
from windtunnel.cli.main import app
from windtunnel.training.gradsync.files import read, write
from windtunnel.training.gradsync.formats import steps
from windtunnel.training.gradsync.model import SyncPlan, SyncProfile
from windtunnel.training.gradsync.run import gain, plan_run, stored
from windtunnel.training.gradsync.run import plan as planned

SCRIPT = Path(__file__).parents[3] / "examples" / "train_resnet.py"


def call(*arguments: str, verb: Sequence[str] = ("gradsync",)) -> str:
    done = CliRunner().invoke(app, [*verb, *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.slow
def test_a_script_is_planned_for_before_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every gradient of the captured graph is in the plan; on a faster network less of it is compressed."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    out = tmp_path / "plan.json"
    arguments = ["--out", str(out), "--json", str(SCRIPT), "--size", "debug"]
    summary = json.loads(call("plan", "--cluster", "v100:2x2,nic=ethernet-1", *arguments))
    plan = from_plain(SyncPlan, summary["plan"])
    assert read(out, SyncPlan) == plan == stored("last").plan
    measured = read(Path(summary["directory"]) / "profile.json", SyncProfile)
    names = [tensor.name for tensor in measured.tensors]
    assert len(names) == len(set(names)) == 38
    # backward begins at the output; the names are those in DDP, so that the plan can be applied
    assert (names[0], names[-1]) == ("output.weight", "stem.0.weight")
    # as DDP's buckets have them
    assert sum(tensor.numel for tensor in measured.tensors) * 4 == 1_082_408 + 160_576
    assert planned(measured) == plan
    assert {group.option.codec for group in plan.groups} <= {"none", "fp16", "bf16", "int8"}
    assert summary["verdict"].startswith("compress with")
    ours = plan.forecasts[0]
    assert (
        summary["to_loss_s"] == ours.seconds
        and f"{ours.seconds * 1e3:.4g} to a loss (1 times" in summary["verdict"]
    )
    verb = ["advise", "--json", "--cluster", "h100-sxm:1x2", str(SCRIPT), "--size", "debug"]
    network, gradients = json.loads(call(verb=verb))
    assert (
        0 < network["share"] < 1 and f"{network['share']:.1%} of an emulated iteration" in network["finding"]
    )
    assert network["command"] == f"windtunnel emulate --cluster h100-sxm:1x2 {SCRIPT} --size debug"
    assert "do not compress" in gradients["finding"] and abs(gradients["gain"]) < 0.2
    own, emulated = re.findall(r"has (\S+) ms for the iteration .* with (\S+) ms", gradients["finding"])[0]
    assert float(own) == pytest.approx(float(emulated), rel=0.05)
    assert gradients["command"] == f"windtunnel gradsync explain {stored('last').run}"
    explained = call("explain", summary["run"])
    assert "hidden behind other work" in explained or "longer with" in explained


def test_a_profile_is_planned_for_on_its_own_network_or_on_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    file = tmp_path / "profile.json"
    write(file, profile([1 << 20] * 4, 1e7))
    slow, fast = plan_run(None, profile=file), plan_run(None, profile=file, cluster="h100-sxm:2x1")
    assert slow.profile.network.world == 8
    assert (fast.profile.network.world, fast.plan.emulated) == (2, "on h100-sxm:2x1")
    assert stored(slow.run).plan == slow.plan


def test_a_codec_that_costs_steps_is_asked_for_and_told_in_seconds_to_a_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    file = tmp_path / "profile.json"
    write(file, profile([1 << 20] * 4, 1e7))
    free, lossy = (plan_run(None, profile=file, lossy=allowed).plan for allowed in (False, True))
    plain, ours = free.forecasts[1], lossy.forecasts[0]
    assert ours.to_loss == ours.seconds * steps()["dragonn:0.01"] < free.forecasts[0].to_loss < plain.to_loss
    assert gain(lossy) == pytest.approx(plain.seconds / ours.to_loss - 1)
    said = call("plan", "--lossy", "--profile", str(file))
    for words in (
        "to a loss",
        "times the steps",
        f"{ours.steps:.3g} times the steps, {gain(lossy):+.1%} speed",
    ):
        assert words in " ".join(said.split())
    with pytest.raises(UserError, match=r"`codecs` dragonn:0\.01: training needs .* which `lossy` allows"):
        plan_run(None, profile=file, codecs=["dragonn:0.01"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": None}, "a SCRIPT or `profile` FILE is needed"),
        ({"program": "x.py"}, "`cluster` is needed"),
        ({"program": "none.py", "cluster": "v100:1x2"}, r"none\.py"),
        ({"program": None, "profile": Path("none.json")}, "profile none.json: No such file"),
        ({"program": None, "profile": Path(__file__)}, "a file written by windtunnel gradsync is accepted"),
    ],
)
def test_bad_input_is_refused(
    arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    with pytest.raises(UserError, match=message):
        plan_run(**arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no plan yet"):
        stored("last")


def test_a_file_that_was_changed_by_hand_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """As every manifest is (tests of the store); here those of both kinds are read back as they were."""
    file, few = tmp_path / "file.json", profile([1 << 10] * 3, 1e7)
    for value in (few, planned(few)):
        kind: type = type(value)
        write(file, value)
        assert read(file, kind) == value
        text = file.read_text()
        for odd in (text.replace("p0", "p9"), text.replace('"version":4', '"version":3'), text[:-9], "{}"):
            file.write_text(odd)
            with pytest.raises(UserError, match="a file written by windtunnel gradsync is accepted") as error:
                read(file, kind)
            assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_ranks_would_all_say_is_said_before_any_begins(tmp_path: Path) -> None:
    plan_file, script, plain = tmp_path / "plan.json", tmp_path / "train.py", tmp_path / "profile.json"
    given = profile([1 << 20] * 2, 1e7)
    sync_plan = planned(given)
    write(plan_file, sync_plan)
    write(plain, given)
    script.write_text("import windtunnel\n")
    folder = f"--out {tmp_path}/none/x: a file in a folder that is there"
    for arguments, words in (
        (["profile", "none.py"], "script 'none.py' does not exist"),
        (["profile", "--codec", "zip", str(script)], "codec 'zip' is unknown"),
        (["profile", "--codec", "dragonn:0.2", str(script)], "--codec dragonn:0.2: how many steps training"),
        (["profile", "--out", f"{tmp_path}/none/x", str(script)], folder),
        (["plan", "--out", f"{tmp_path}/none/x", "--profile", str(plain)], folder),
        (
            ["apply", str(plan_file), str(script)],
            f"it is for {sync_plan.world} ranks; --ranks {sync_plan.world} is",
        ),
        (
            ["apply", "--ranks", str(sync_plan.world), str(plan_file), "none.py"],
            "script 'none.py' does not exist",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            CliRunner().invoke(app, ["gradsync", *arguments], catch_exceptions=False)


@pytest.mark.conformance
def test_what_all_ranks_say_is_said_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import windtunnel\n")
    done = windtunnel("gradsync", "profile", script)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"windtunnel: {script}: it wraps no model in DistributedDataParallel"


def test_bad_advice_is_refused() -> None:
    for cluster, script, word in (("v100:1x2", "none.py", r"none\.py"), ("none", str(SCRIPT), "'none'")):
        with pytest.raises(UserError, match=word):
            advise(script, (), cluster, lambda *_: None)
