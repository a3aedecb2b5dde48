"""``windtunnel serve DIR`` with what the directory says, and with a user's own policy."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from support.families import tiny
from support.serving import Served, served
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.replay import replay
from windtunnel.serving import simulate
from windtunnel.serving.engine.live import families
from windtunnel.serving.engine.live.loop import Token
from windtunnel.serving.engine.live.sampling import Sampled
from windtunnel.serving.engine.live.serve import count_idle_cores, serve
from windtunnel.serving.engine.live.server import _Choice
from windtunnel.serving.engine.live.tokens import ByteTokens
from windtunnel.serving.engine.settings import ServeSettings
from windtunnel.store import runs

ENDS = list(range(3, families.VOCABULARY, 5))
SAID = {"eos_token_id": ENDS, "do_sample": True, "temperature": 0.7, "top_k": 1, "bos_token_id": 1}
PAGE = (Path(__file__).parents[3] / "docs" / "branching.md").read_text()
OWN = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "# mine.py" in code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 whose end tokens stand in its ``generation_config.json`` alone."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny("qwen3", vocab_size=families.VOCABULARY, eos_token_id=None)
    families.build(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(SAID))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    (folder / "mine.py").write_text(OWN)
    words = ["--name", "m", "--policy", f"{folder}/mine.py", "--log", "1", "--prefix-cache", "none"]
    with served(folder / "home", *words, model=(str(folder),)) as running:
        yield running


def _tokens(server: Served, **fields: Any) -> tuple[list[str], str]:
    """Of one answer, and why it ended."""
    asked = {"model": "m", "prompt": "The wing", "max_tokens": 40, "logprobs": 0, **fields}
    (choice,) = server.post("completions", **asked)["choices"]
    return choice["logprobs"]["tokens"], choice["finish_reason"]


def test_a_model_whose_end_tokens_stand_in_its_generation_config_stops(server: Served) -> None:
    whole, reason = _tokens(server, temperature=0, ignore_eos=True)
    assert reason == "length" and len(whole) == 40
    ends = {ByteTokens().decode([token]) for token in ENDS}
    place = next(at for at, token in enumerate(whole) if token in ends)
    assert _tokens(server, temperature=0) == (whole[:place], "stop")


def test_what_a_request_does_not_say_of_sampling_its_model_says(server: Served) -> None:
    greedy, _ = _tokens(server, temperature=0, ignore_eos=True)
    assert _tokens(server, ignore_eos=True, seed=1)[0] == greedy, "top_k is 1"
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "ignore_eos": True}
    drawn = [_tokens(server, **own, seed=seed)[0] for seed in (1, 1, 2)]
    assert greedy != drawn[0] == drawn[1] != drawn[2]


def test_a_generation_config_that_cannot_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("home"))
    (tmp_path / "model" / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        families.load(tmp_path / "model")


def test_top_logprobs_without_logprobs_are_refused(server: Served) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("chat/completions", **asked, top_logprobs=2)
    with refused.value as error:
        said = json.loads(error.read())["error"]
    assert error.code == 400 and said["param"] == "top_logprobs"
    assert said["message"] == "top_logprobs: logprobs must be set to true if this parameter is used"
    answer = server.post("chat/completions", **asked, logprobs=True, top_logprobs=2, ignore_eos=True)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 2


def test_weights_are_as_the_config_has_them_and_a_policy_of_ones_own_decides(
    server: Served, folder: Path
) -> None:
    """The last test of this server: it is gone after it."""
    more = {"max_tokens": 6, "n": 4, "ignore_eos": True}
    assert len(server.post("completions", model="m", prompt="a", **more)["choices"]) == 4
    assert server.stop() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_HOME", str(server.home))
        run = runs.Store.open().get(server.run)
    assert run.summary is not None and run.summary["model"]["dtype"] == "bfloat16"
    parts = {part.capability: part for part in replay(server.log).parts}
    own = parts["serving.branching"]
    assert own.recorded_by == {str(folder / "mine.py"): own.decisions} and own.same == own.decisions > 0
    differences = replay(server.log, "eager").parts[-1].differences
    assert {len(difference.replayed["admitted"]) for difference in differences} > {1}


def test_caches_and_states_have_the_type_of_the_weights(folder: Path) -> None:
    for dtype, wanted in ((None, torch.bfloat16), (torch.float16, torch.float16), (torch.float32,) * 2):
        executor = families.load(folder, dtype=dtype)
        assert executor.dtype == wanted
        held = {each.dtype for slots in executor.store.slots.values() for each in slots.tensors.values()}
        assert held == {wanted}
    hybrid = families.load("tiny-hybrid", dtype=torch.bfloat16)
    assert hybrid.pool.tensors["conv", 0, 0].dtype == torch.bfloat16
    assert families.load("tiny-attention").dtype == torch.float32


def test_a_type_that_a_model_cannot_have_is_refused_in_a_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build(tiny("qwen3"))
    model.model.norm.weight.data.mul_(1e5)
    model.save_pretrained(tmp_path)
    assert families.load(tmp_path).dtype == torch.float32
    with pytest.raises(UserError, match="cannot be served in float16: what it computes are not finite"):
        families.load(tmp_path, dtype=torch.float16)
    plain = torch.nn.functional.silu

    def silu(given: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        if given.dtype == torch.bfloat16:
            raise RuntimeError("no such kernel")
        return plain(given, inplace)

    monkeypatch.setattr(torch.nn.functional, "silu", silu)
    with pytest.raises(UserError, match="in bfloat16: RuntimeError in its own code, no such kernel"):
        families.load(folder)
    with pytest.raises(UserError, match=r"`dtype` 'int8' is unknown; accepted are auto, float32, bfloat16"):
        serve(ServeSettings("tiny-attention", port=0, dtype="int8"))


def test_rules_of_the_prefix_cache_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UserError, match="`rules` 'lru' is unknown; accepted are density"):
        serve(ServeSettings("no/such/place", port=0, rules="lru"))


def test_threads_are_as_many_as_there_are_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [SimpleNamespace(idle=idle, iowait=3.0) for idle in (96.0, 88.0, 86.0, 0.0)]
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval, percpu: looks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert count_idle_cores() == (2, 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert count_idle_cores() == (0, 2)


def _file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_trace_is_emulated_with_a_policy_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,37,40\n0.5,300,40\n")
    asked = {"trace": trace, "step_time": "base=0.01,row=1e-4,token=1e-4", "every": 1}
    asked["branches"] = "share=1,count=4-4,tokens=30"
    mine = tmp_path / "mine.py"
    emulated = simulate(branching=_file(mine, OWN), **asked)
    assert emulated.summary["finished"] == 2
    assert emulated.summary["steps"] != simulate(branching="eager", **asked).summary["steps"]
    (part,) = (part for part in _replayed(emulated.run) if part.capability == "serving.branching")
    assert set(part.recorded_by) == {str(mine)} and part.same == part.decisions > 0

    late = (
        "from windtunnel.serving.engine.policy import decide as plain\nCAPABILITY = 'serving.engine'\n"
        "def decide(observation):\n    return plain(observation, 'wait')\n"
    )
    emulated = simulate(branching=_file(mine, late), ttft=1e-3, **asked)
    assert (
        emulated.summary["refused"] == 0 < simulate(branching="taper", ttft=1e-3, **asked).summary["refused"]
    )

    head = "from windtunnel.serving.branching.policy import Decision\ndef decide(observation):\n    "
    for kind, text, said in (
        (ScriptError, head + "return 1 / 0", r"mine\.py: decide failed: division by zero"),
        (ScriptError, head + "return 7", r"decide answered 7, accepted is a windtunnel\.serving\.branching"),
        (ScriptError, head + "return Decision(((99, 1),))", "which is not possible here"),
        (ScriptError, late.replace("'wait')", "'wait').__class__((7,))"), "which is not possible here"),
        (
            ScriptError,
            late.replace("plain(observation, 'wait')", "plain(observation).__class__()"),
            "not possible here",
        ),
        (ScriptError, "1 / 0", r"mine\.py failed: division by zero"),
        (UserError, "x = 1", r"defines no function decide"),
        (UserError, f"CAPABILITY = 'network.dag'\n{head}pass", r"CAPABILITY 'network\.dag' is not accepted"),
    ):
        with pytest.raises(kind, match=said):
            simulate(branching=_file(mine, text), **asked)
    whole = (
        "from windtunnel.serving.engine.policy import Decision\nCAPABILITY = 'serving.engine'\n"
        "def decide(observation):\n    waiting, filling = observation.waiting, observation.filling\n"
        "    parts = tuple((sequence.request, sequence.unit, sequence.stop) for sequence in filling)\n"
        "    return Decision(tuple(request.request for request in waiting), prefill=parts)\n"
    )
    assert simulate(branching=_file(mine, whole), **asked).summary["finished"] == 2
    with pytest.raises(ScriptError, match="which is not possible here"):
        simulate(branching=_file(mine, whole), chunk=100, **asked)  # of a prompt of 300
    with pytest.raises(UserError, match=r"there is no file .*none\.py"):
        simulate(branching=str(tmp_path / "none.py"), **asked)


def _replayed(run: str) -> list[Any]:
    return replay(runs.Store.open().get(run).directory / "events.jsonl").parts


def test_every_token_has_its_place_in_the_text() -> None:
    choice = _Choice(0, ByteTokens(), [])
    for token in ByteTokens().encode("aé風!"):
        choice.add(Token(1, 0, Sampled(token, -0.5, ((token, -0.5),))))
    assert [token.top[0][0] for token in choice.logprobs] == [token.token[0] for token in choice.logprobs]
    assert [token.offset for token in choice.logprobs] == [0, 1, 1, 2, 2, 2, 3] and choice.text == "aé風!"
