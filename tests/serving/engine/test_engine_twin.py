"""The engine's twin: the clock jumps as single steps would go, nobody is lost, and hand-made cases come out
as reckoned."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import cases
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.cluster.load import load_cluster
from windtunnel.serving import simulate
from windtunnel.serving.engine import profile
from windtunnel.serving.engine.model import InferenceRequest, Objective, Serial, StepTime
from windtunnel.serving.engine.policy.step import StepLimits
from windtunnel.serving.engine.twin import figures, models
from windtunnel.serving.engine.twin.world import Results, TwinPrefixes, serve
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.prefixcache.policy.shapes import ModelShape
from windtunnel.serving.prefixcache.policy.tree import PrefixCache
from windtunnel.store import eventlog
from windtunnel.store.runs import Store

TIME = StepTime(base=0.01, row=1e-4, kv=1e-6, token=3e-4, pair=1e-7)
WIDE = StepLimits(rows=64, kv=100_000, admission="wait")


def one_by_one(requests: list[InferenceRequest], given_limits: StepLimits, time: StepTime) -> Results:
    return serve(requests, given_limits, time, jump=False)


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([TIME, replace(TIME, kv=0.0), replace(TIME, kv=1e-3)]))
def test_jumping_is_single_steps_and_every_request_ends_once(
    case: tuple[list[InferenceRequest], StepLimits], time: StepTime
) -> None:
    requests, given_limits = case
    jumped, slow = serve(requests, given_limits, time), one_by_one(requests, given_limits, time)
    assert jumped.steps == slow.steps and jumped.planned <= slow.planned
    assert np.array_equal(jumped.refused, slow.refused)
    for name in ("first", "end"):
        assert np.allclose(getattr(jumped, name), getattr(slow, name), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert np.array_equal(jumped.tokens, slow.tokens)
    finished = ~np.isnan(jumped.end)
    assert (finished ^ jumped.refused).all(), "finished or refused, exactly once"
    asked = [
        sum(sum(stage.tokens) if hasattr(stage, "heads") else stage.tokens for stage in r.stages)
        for r in requests
    ]
    assert jumped.tokens[finished].tolist() == np.array(asked)[finished].tolist()
    assert (jumped.first[finished] >= jumped.arrival[finished]).all()
    assert jumped.gain == pytest.approx(1.0, abs=1e-6), "what takes as long as modelled teaches nothing"


def test_a_hand_made_case() -> None:
    """Two requests: 2 tokens of prompt and 3 of answer, the second comes in the first one's decoding."""
    time = StepTime(base=1.0, row=0.1, kv=0.01, token=0.5, pair=0.0)
    done = serve(
        [InferenceRequest(5, 0.0, 2, (Serial(3),)), InferenceRequest(6, 2.5, 2, (Serial(2),))], WIDE, time
    )
    # from 0 a prefill, 1 + 2·0.5 = 2; from 2 a row that reads 2, 1.12; from 3.12 a row that reads 3 beside a
    # prefill, 2.13; from 5.25 a row that reads 2, 1.12
    assert done.first.tolist() == [2.0, pytest.approx(5.25)]
    assert done.end.tolist() == [pytest.approx(5.25), pytest.approx(6.37)]
    times = figures.compute_times([done], Objective(ttft=2.5, tpot=1.625))
    assert times.tpot.tolist() == pytest.approx([1.625, 1.12]) and times.attained.tolist() == [True, False]
    summary = figures.summarise([done], times, 4, 100_000, load_cluster("h100-sxm:1x2,price=3600"))
    assert summary["goodput"] == pytest.approx(1 / 6.37) and summary["cost"]["total"] == pytest.approx(
        2 * 6.37
    )
    assert (summary["steps"], summary["attainment"], summary["refused"]) == (4, 0.5, 0)


def test_a_queue_of_one_server_waits_as_the_formula_says() -> None:
    """M/D/1: one row, answers of one token, so that each request is one step of S seconds; the mean wait in
    the queue is rho·S / (2·(1 - rho)) (Pollaczek and Khinchine)."""
    seconds, rho, count = 0.1, 0.7, 20_000
    random = np.random.default_rng(3)
    arrivals = np.cumsum(random.exponential(seconds / rho, count)).tolist()
    requests = [InferenceRequest(number, when, 1, (Serial(1),)) for number, when in enumerate(arrivals)]
    limits_of_one = StepLimits(rows=1, kv=100, chunk=1, admission="wait")
    done = serve(requests, limits_of_one, StepTime(seconds, 0.0, 0.0, 0.0, 0.0))
    waited = float((done.end - done.arrival).mean()) - seconds
    assert waited == pytest.approx(rho * seconds / (2 * (1 - rho)), rel=0.05)
    assert done.busy == pytest.approx(count * seconds)


def test_steps_that_take_longer_than_believed_are_learned_and_come_from_a_seed() -> None:
    requests = [InferenceRequest(n, n * 0.05, 30, (Serial(20),)) for n in range(40)]
    slow = serve(requests, WIDE, TIME, truth=replace(TIME, base=0.02))
    assert slow.gain > 1.2 and slow.end[-1] > serve(requests, WIDE, TIME).end[-1]
    noisy = [
        serve(requests, WIDE, TIME, jitter=0.1, random=np.random.default_rng(seed)).end for seed in (1, 1, 2)
    ]
    assert np.array_equal(noisy[0], noisy[1]) and not np.array_equal(noisy[0], noisy[2])


def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    done = serve(
        [InferenceRequest(0, 0.0, 200, (Serial(9),)), InferenceRequest(1, 0.0, 9, (Serial(9),))],
        StepLimits(4, 100),
        TIME,
    )
    assert done.refused.tolist() == [True, False] and "there is room for 100" in done.never[0]
    with pytest.raises(ValueError, match="sorted"):
        serve(
            [InferenceRequest(0, 1.0, 2, (Serial(1),)), InferenceRequest(1, 0.0, 2, (Serial(1),))], WIDE, TIME
        )


def test_what_prompts_share_is_read_once() -> None:
    """Ten prompts of 4 blocks, of which 3 are the same, with room for all and with none."""
    symbols = {n: np.array([1, 2, 3, 100 + n]) for n in range(10)}
    requests = [InferenceRequest(n, n * 5.0, 64, (Serial(4),)) for n in range(10)]

    def through(capacity: int) -> Results:
        cache = PrefixCache(ModelShape(kv=1, state=0, token=1.0), capacity, RULES["three-lru"], unit=16)
        return serve(requests, WIDE, TIME, prefixes=TwinPrefixes(cache, symbols))

    shared, none = through(10_000), through(10)
    assert shared.cached.tolist() == [0] + [48] * 9 and not none.cached.any()
    assert (none.first - shared.first)[1:] == pytest.approx([48 * 3e-4 + 1e-7 * 0] * 9, rel=0.05)


def test_published_models_have_the_sizes_of_their_authors() -> None:
    published = {
        "llama-2-7b": 6.74,
        "llama-3-8b": 8.03,
        "llama-3-70b": 70.6,
        "qwen3-8b": 8.19,
        "qwen3-32b": 32.8,
    }
    for name, billions in published.items():
        assert models.model_like(name).weights / 2e9 == pytest.approx(billions, rel=0.005)
    model, cluster = models.model_like("qwen3-32b"), load_cluster("h100-sxm:1x2")
    assert model.shape.kv == 2 * 64 * 8 * 128 * 2
    alone = models.roofline(model, cluster, 1, 500)
    assert alone > model.read / (2 * cluster.host.device.memory_bandwidth), "weights are read once a step"
    wide = load_cluster("h100-sxm:1x8")
    assert alone / 4 < models.roofline(model, wide, 1, 500) < alone, "summing up takes its part"
    fitted, error = models.step_time(model, cluster, 64, 512, 300_000)
    assert error < 0.12 and fitted.of(32, 32_000) == pytest.approx(
        models.roofline(model, cluster, 32, 32_000), rel=0.2
    )
    assert models.kv_tokens(model, wide) > 4 * models.kv_tokens(model, cluster)
    with pytest.raises(UserError, match=r"weights of llama-3-70b take 141.* accepted are more devices"):
        models.kv_tokens(models.model_like("llama-3-70b"), load_cluster("a100-80:1x1"))
    with pytest.raises(UserError, match="neither a model known here nor a config"):
        models.model_like("gpt-9")


@pytest.mark.parametrize(
    ("given_step", "said"),
    [
        ("calibrated", "there is no profile .* measure one with: windtunnel calibrate serving.engine"),
        ("base=x", "'base=x' is not one of base, row, kv, token, pair, decode, chunk with a number"),
        ("rows=1", "'rows=1' is not one of"),
        ("row=1", "base, the seconds of any step, must be above 0"),
        ("base=-1", "not a number of seconds from 0"),
    ],
)  # fmt: skip
def test_a_wrong_step_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_step: str, said: str
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    with pytest.raises(UserError, match=said):
        profile.step_time(given_step)


def test_a_trace_is_emulated_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb: figures as JSON, decisions that are kept, and the same bytes from the same seed."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {"timestamp": 400 * n, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 10 + n]}
            )
            + "\n"
            for n in range(40)
        )
    )
    words = ["serve", "--trace", str(trace), "--on", "a100-80:2x1,price=2", "--model-like", "llama-3-8b"]
    words += ["--policy", "eager", "--branches", "share=0.5,count=2-4,tokens=20", "--ttft", "1", "--log", "1"]
    done = [CliRunner().invoke(app, [*words, "--json"]) for _ in range(2)]
    assert [result.exit_code for result in done] == [0, 0], done[0].output
    first, second = (json.loads(result.stdout) for result in done)
    run = first.pop("run")
    assert second.pop("run") != run and first == second
    assert first["finished"] == first["requests"] == 40 and first["attainment"] == 1.0
    assert 0.5 < first["cached"] < 1024 / 1100 and first["cost"]["total"] > 0
    assert "synthetic" in first["about"]["trace"] and first["origin"] == "emulated"
    kept = Store.open().get(run)
    assert kept.summary is not None and kept.summary["goodput"] == first["goodput"]
    decided = eventlog.decisions(kept.directory / eventlog.NAME)
    assert {event["capability"] for event in decided} == {"serving.engine", "serving.branching"}
    shown = CliRunner().invoke(app, ["replay", run, "--policy", "off"])
    assert shown.exit_code == 0 and "seconds:" in shown.stdout and "tokens:" in shown.stdout


def test_what_cannot_be_emulated_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,37,4\n0.5,3000,4\n")
    numbers = "base=0.01,token=1e-4"
    for wrong, said in (
        ({}, "`trace` needs `on` CLUSTER with `model_like` NAME"),
        ({"step_time": numbers, "on": "h100-sxm:1x2"}, "`trace` needs `on` CLUSTER"),
        ({"step_time": numbers, "branching": "x"}, "`branching` 'x' is unknown; accepted are"),
        ({"step_time": numbers, "speed_up": 0.0}, "`speed_up` 0 is not accepted"),
        ({"step_time": numbers, "rows": 0}, "`rows` 0 is not accepted; use 1 or more"),
        ({"step_time": numbers, "tpot": float("nan")}, "`tpot` nan is not accepted; use 0 or more"),
        ({"step_time": numbers, "branches": "share=1"}, "`branches` 'share=1' is not accepted; use share"),
        ({"on": "a100-80:1x1", "model_like": "llama-3-8b", "kv": 1 << 40}, "it has room for"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            simulate(trace=trace, **wrong)
    emulated = simulate(trace=trace, step_time=numbers, chunk=1000, every=0)
    assert emulated.times.ttft.tolist() == pytest.approx([0.0137, 3 * 0.11 - 0.0], abs=0.02)
    assert emulated.summary["refused"] == 0 and inf not in emulated.times.total


def test_what_is_emulated_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,37,4\n0.5,3000,4\n")
    words = ["serve", "--trace", str(trace), "--step-time", "base=0.01,token=1e-4", "--kv", "64"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for said in ("first token (TTFT)", "2: 1 finished, 1 refused", "never served", "there is room for 64"):
        assert said in done.stdout
