"""What the scheduler in vLLM is asked for, and how its server is started."""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import inf
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.serving.engine.model import Objective
from windtunnel.serving.vllm.serve import SCHEDULER, Server
from windtunnel.serving.vllm.settings import VllmSettings


def test_settings_are_read_as_they_were_written() -> None:
    settings = VllmSettings("eager", "wait", ttft=0.5, every=0)
    assert VllmSettings.read(json.loads(json.dumps(settings.additional()))) == settings
    assert VllmSettings.read({}) == VllmSettings.read({"other": 1}) == VllmSettings()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"windtunnel": 3}, "`windtunnel` is 3, accepted is an object"),
        ({"windtunnel": {"pace": 1}}, "`windtunnel.pace` is unknown; accepted are policy, admission"),
        ({"windtunnel": {"ttft": "soon"}}, "`windtunnel.ttft` is 'soon', accepted is float"),
        ({"windtunnel": {"ttft": 0}}, "`windtunnel.ttft` is 0"),
        ({"windtunnel": {"every": True}}, "`windtunnel.every` is True, accepted is int"),
        ({"windtunnel": {"policy": 1}}, "`windtunnel.policy` is 1, accepted is str"),
    ],
)
def test_a_wrong_setting_is_refused(given: object, words: str) -> None:
    with pytest.raises(UserError) as refused:
        VllmSettings.read(given)
    assert words in str(refused.value)


def test_a_request_may_have_an_objective_of_its_own() -> None:
    settings = VllmSettings(ttft=0.5)
    assert settings.objective(None) == Objective(0.5, inf)
    assert settings.objective({"ttft": 0.2, "tpot": 0.05, "other": 1}) == Objective(0.2, 0.05)
    assert settings.objective({"ttft": "soon"}) == Objective(0.5, inf)


def test_a_server_is_started_with_the_scheduler(tmp_path: Path) -> None:
    words = Server(str(tmp_path), "m", port=7, more="--max-model-len 9").command(VllmSettings(tpot=0.1))
    assert words[words.index("--scheduler-cls") + 1] == SCHEDULER
    assert json.loads(words[words.index("--additional-config") + 1])["windtunnel"]["tpot"] == 0.1
    assert words[-2:] == ["--max-model-len", "9"] and "--skip-tokenizer-init" in words
    (tmp_path / "tokenizer.json").touch()
    plain = Server(str(tmp_path), scheduler=False).command(VllmSettings())
    assert "--skip-tokenizer-init" not in plain and "--scheduler-cls" not in plain
    assert plain[plain.index("--served-model-name") + 1] == tmp_path.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "other"], "--engine 'other' is unknown; accepted are own, vllm"),
        (["--engine", "vllm"], "--engine vllm needs DIR"),
        (["--config", "tiny-hybrid", "--vllm", "--x"], "--vllm is for --engine vllm"),
        (["--engine", "vllm", "m", "--policy", "other"], "--policy 'other' is unknown"),
    ],
)
def test_what_cannot_be_served_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(done.exception, UserError) and said in str(done.exception)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_where_vllm_is_not_installed_a_sentence_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--engine", "vllm", str(tmp_path)])
    assert isinstance(done.exception, UserError) and "pip install 'windtunnel[vllm]'" in str(done.exception)
