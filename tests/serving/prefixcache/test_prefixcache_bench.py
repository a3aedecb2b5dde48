"""The bench's worlds: sessions of a seed, traces with hashes, an oracle that nobody beats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.run import run
from benchmarks.serving.prefixcache.rows import BLIND, GB, ORACLE, OURS, _side_by_side, emulated
from benchmarks.serving.prefixcache.sessions import KINDS, sessions, traced
from windtunnel.base.errors import UserError
from windtunnel.traces.requests import load


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_come_from_their_seed(kind: str) -> None:
    asked = sessions(kind, 12, 0.5, 3, unit=16)
    again = sessions(kind, 12, 0.5, 3, unit=16)
    assert [(request.arrival, request.whole.tolist()) for request in asked] == [
        (request.arrival, request.whole.tolist()) for request in again
    ]
    assert all(request.arrival < request.done and request.tokens <= 32_768 for request in asked)
    assert all((request.whole[: len(request.prompt)] == request.prompt).all() for request in asked)
    assert sorted(asked, key=lambda request: request.arrival) == asked
    least, most = KINDS[kind].turns
    assert len(asked) <= 12 * most and (kind == "agent" or len(asked) >= 12 * least)
    assert len({request.prompt[0] for request in asked}) <= len(KINDS[kind].systems)


def test_what_a_trace_shares_is_kept_and_what_was_decoded_does_not_recur(tmp_path: Path) -> None:
    lengths = {"input_length": 1100, "output_length": 500}
    lines = [{**lengths, "timestamp": 9 * last, "hash_ids": [0, 1, last]} for last in (7, 8, 9)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    asked = traced(load(path))
    assert [request.arrival for request in asked] == pytest.approx([0.0, 0.009, 0.018])
    assert asked[0].prompt.tolist() == [0, 1, 7] and asked[0].tokens == 1100
    assert [len(request.whole) for request in asked] == [4] * 3, "1,600 tokens"
    assert asked[0].whole[:2].tolist() == [0, 1]
    unknown = np.concatenate([request.whole[2:] for request in asked])
    assert len(set(unknown.tolist())) == 6 and unknown.max() < 0


def test_no_policy_saves_more_than_the_oracle_and_rows_say_so() -> None:
    asked = sessions("chat short", 60, 1.0, 5, unit=16)
    names = ("none", "every32", "block528", "radix", "marconi", "three-lru", OURS, BLIND, ORACLE)
    outcomes = {name: emulated(name, asked, 4 * GB, 16) for name in names}
    assert outcomes["none"].hits == 0
    assert all(outcome.flops <= outcomes[ORACLE].flops for outcome in outcomes.values())
    assert outcomes["radix"].flops < outcomes[OURS].flops
    assert all(outcome.peak <= 4 * GB for outcome in outcomes.values())
    rows = list(_side_by_side("chat", asked, (4,), (4.5, 1.4), "LMSys", names, 16))
    [gap] = [row for row in rows if "oracle eviction" in row.name]
    assert gap.emulated == outcomes[OURS].flops / outcomes[ORACLE].flops and gap.passed == (
        gap.emulated >= 0.9
    )
    [least] = [row for row in rows if "vLLM+" in row.name]
    assert least.published == 4.5 and least.emulated == outcomes[OURS].hits / outcomes["every32"].hits


def test_a_trace_is_taken_by_the_section_that_wants_one(tmp_path: Path) -> None:
    (path := tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n")
    [row] = run("serving.prefixcache", ("mooncake",), quick=True, trace=path)
    assert "does not tell what prompts share" in row.note
    [row] = run("serving.prefixcache", ("mooncake",), quick=True)
    assert "give --trace conversation_trace.jsonl" in row.note
    with pytest.raises(
        UserError, match=r"--trace .* is of no section that runs here; accepted with mooncake"
    ):
        run("serving.prefixcache", ("agents",), trace=tmp_path / "trace.jsonl")
