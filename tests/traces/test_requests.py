"""Traces of requests as they are distributed are read; what is wrong in one is told in a sentence."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.traces.requests import branched, load

# first rows of the traces: Azure's (CC-BY 4.0), Vidur's (MIT), Mooncake's (Apache 2.0)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:15:51.2224670,879,55"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-09 23:59:59.900000+00:00,2162,5
2024-05-10 00:00:00.009930+00:00,2399,6
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n4.541877,879,55\n"
BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,2.1,ChatGPT,472,18,490,Conversation log
45,,,GPT-4,1087,0,1087,API log
118,2,8,"GPT-4",417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 513, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 7, "output_length": 1, "hash_ids": [2]}
"""
BAILIAN = """{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": \
132, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}
"""


def read(folder: Path, text: str) -> list[tuple[float, int, int]]:
    path = folder / "trace"
    path.write_text(text)
    trace = load(path)
    columns = trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist()
    return [(round(when, 4), *rest) for when, *rest in zip(*columns, strict=True)]


def test_each_form_is_known_by_its_columns(tmp_path: Path) -> None:
    same = [(0.0, 374, 44), (4.3146, 396, 109), (4.5419, 879, 55)]
    assert read(tmp_path, AZURE) == same
    assert read(tmp_path, VIDUR) == same, "Vidur's trace was made of Azure's"
    assert read(tmp_path, AZURE_2024) == [(0.0, 2162, 5), (0.1099, 2399, 6)], "over midnight"
    assert read(tmp_path, BURST) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert load(tmp_path / "trace").left_out == 1
    assert read(tmp_path, MOONCAKE) == [(0.0, 513, 500), (3.0, 7, 1)]
    trace = load(tmp_path / "trace")
    assert (trace.unit, [blocks.tolist() for blocks in trace.ids]) == (512, [[0, 1], [2]])
    assert read(tmp_path, BAILIAN) == [(0.0, 33, 132)]
    assert load(tmp_path / "trace", blocks=True).unit == 16
    (tmp_path / "trace").write_text(AZURE)
    with pytest.raises(UserError, match="Azure LLM inference does not tell what prompts share; accepted are"):
        load(tmp_path / "trace", blocks=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty; accepted are the forms Azure LLM inference, BurstGPT"),
        ("a,b\n1,2\n", "line 1: columns a, b are of no known trace; accepted are TIMESTAMP, ContextTokens"),
        ("TIMESTAMP,ContextTokens\n", "line 1: column GeneratedTokens is missing; a trace of Azure"),
        ("num_prefill_tokens,num_decode_tokens\n1,1\n", "line 1: column arrived_at is missing"),
        ("Timestamp,Model\n5,GPT-4\n", "line 1: columns Request tokens and Response tokens are missing"),
        (AZURE.replace("396", "-396"), "line 3: field ContextTokens: '-396' is not accepted; use a num"),
        (AZURE.replace("109", "x"), "line 3: field GeneratedTokens: 'x' is not accepted; use a num"),
        (AZURE.replace("18:15:50", "25:15:50"), "line 3: field TIMESTAMP: '2023-11-16 25:15:50."),
        (AZURE.replace(":51.", ":49."), r"line 4: field TIMESTAMP: it is 1.7727 s earlier"),
        (AZURE.replace(",396,", ","), "line 3: it has 2 fields; accepted are 3"),
        (VIDUR.replace("4.314579", "nan"), "line 3: field arrived_at: 'nan' is not accepted; use a num"),
        (VIDUR.replace("44", '"4\n4'), "line 2: it is not csv: unexpected end of data"),
        (VIDUR[:48], "it holds no request with a prompt and an answer"),
        (MOONCAKE.replace("[2]", "[2, 3]"), "line 2: field hash_ids: '2 numbers' is not acc"),
        (MOONCAKE.replace("[2]", '["2"]'), "line 2: field hash_ids: .* use a list of whole numbers"),
        (MOONCAKE.replace("500", "-500"), "line 1: field output_length: -500 is not accepted; use a num"),
        (MOONCAKE.replace("500", "5.5"), "line 1: field output_length: 5.5 is not accepted; use a whole"),
        (MOONCAKE.replace('"hash_ids": [2]', '"x": 1'), "line 2: field hash_ids is missing"),
        (MOONCAKE[:-3], "line 2: not JSON"),
        ("0,1.3,8.5,Weibull,0.37,0.39\n", "line 1: columns .* are of no known trace"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(str(tmp_path / "trace"))


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the trace cannot be read: No such file"):
        load(tmp_path / "trace")
    (tmp_path / "trace").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="the trace is not UTF-8 text"):
        load(tmp_path / "trace")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([AZURE, VIDUR, BURST, MOONCAKE]), st.data())
def test_no_change_of_a_trace_is_met_by_anything_but_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 12)))
    put = data.draw(
        st.text(max_size=6) | st.sampled_from(["9" * 30, '"', ",", "\n", "1e999", "-1", "[", "\r"])
    )
    folder = tmp_path_factory.getbasetemp() / "mutants"
    folder.mkdir(exist_ok=True)
    try:
        requests = read(folder, (text[:at] + put + text[until:]).encode(errors="replace").decode())
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert all(b[0] >= a[0] for a, b in pairwise(requests)) and requests


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9000), st.integers(0, 900)), min_size=1))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    rows.sort()
    answered = [(when, asked, got) for when, asked, got in rows if asked and got]
    if not answered:
        return
    text = io.StringIO()
    out = csv.writer(text)
    out.writerow(["Response tokens", "Timestamp", "Model", "Request tokens"])
    out.writerows((got, when, 'a "model", with all', asked) for when, asked, got in rows)
    lines = [
        json.dumps(
            {
                "timestamp": when,
                "input_length": asked,
                "output_length": got,
                "hash_ids": [*range(-(-asked // 512))],
            }
        )
        for when, asked, got in rows
    ]
    folder = tmp_path_factory.getbasetemp()
    begin = answered[0][0]
    assert read(folder, text.getvalue()) == [(when - begin, asked, got) for when, asked, got in answered]
    assert read(folder, "\n".join(lines)) == [
        (round((when - begin) / 1e3, 4), asked, got) for when, asked, got in answered
    ]


def test_a_trace_is_repeated_and_gets_branches_from_a_seed(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(AZURE)
    trace = load(tmp_path / "trace")
    long = trace.repeated(3000)
    gap = trace.seconds / 2
    assert np.allclose(long.arrival[3:6] - long.arrival[:3], trace.seconds + gap) and len(long) == 3000
    assert np.allclose(long.faster(2).arrival * 2, long.arrival)
    with_branches = branched(long, 0.4, (2, 5), 50, np.random.default_rng(1))
    assert with_branches.branches == branched(long, 0.4, (2, 5), 50, np.random.default_rng(1)).branches
    having = [counts for counts in with_branches.branches if counts]
    assert 0.37 < len(having) / 3000 < 0.43 and {len(counts) for counts in having} == {2, 3, 4, 5}
    assert 48 < np.mean([tokens for counts in having for tokens in counts]) < 52
    assert "synthetic" in with_branches.source and not trace.branches
    with pytest.raises(UserError, match="use a share from 0 to 1"):
        branched(long, 1.5, (2, 5), 50, np.random.default_rng(1))
