"""Sizes against the published numbers of parameters; division into stages; refusals of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from example_runs import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import llama_model  # noqa: E402
import train_dlrm  # noqa: E402
import train_moe  # noqa: E402
import train_resnet  # noqa: E402
from llama_arguments import parse_arguments  # noqa: E402
from llama_parallel import stage_layers, stages_of_rank  # noqa: E402
from text_data import TEXT, Bytes  # noqa: E402

VOCABULARY_1B, VOCABULARY_3B = 128_256 * 2048, 128_256 * 3072


@pytest.mark.parametrize(
    ("size", "parameters"),
    [  # the model cards of Llama 3.1 and 3.2; the two small ones there share input and output embeddings
        ("1b", 1_235_814_400 + VOCABULARY_1B),
        ("3b", 3_212_749_824 + VOCABULARY_3B),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_llama_has_the_published_number_of_parameters(size: str, parameters: int) -> None:
    config = llama_model.SIZES[size]
    with torch.device("meta"):
        model = llama_model.Llama(config, 16, range(config.layers))
    assert sum(p.numel() for p in model.parameters()) == parameters


class Group:
    """Stands for a process group of one rank."""

    def size(self) -> int:
        return 1


def test_mixtral_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        arguments = argparse.Namespace(ac="none", seq=16, capacity=1.0)
        model = train_moe.Transformer(train_moe.SIZES["8x7b"], Group(), arguments)
    assert sum(p.numel() for p in model.parameters()) == 46_702_792_704


@pytest.mark.parametrize(("size", "parameters"), [("18", 11_689_512), ("50", 25_557_032)])
def test_resnet_has_the_published_number_of_parameters(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = train_resnet.ResNet(train_resnet.SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@given(layers=st.integers(1, 130), data=st.data())
def test_stages_hold_every_layer_once_in_order(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers + 2))
    held = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [i for layer_range, _, _ in held for i in layer_range] == list(range(layers))
    assert [first for _, first, _ in held] == [True] + [False] * (stages - 1)
    assert [last for _, _, last in held] == [False] * (stages - 1) + [True]
    weight = [len(layer_range) + first + last for layer_range, first, last in held]
    assert max(weight) - min(weight) <= 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved1f1b", "zerobubble", "zbv"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_stage_has_one_rank(schedule: str, ranks: int) -> None:
    stages = [stage for rank in range(ranks) for stage in stages_of_rank(schedule, rank, ranks)]
    assert sorted(stages) == list(range(len(stages)))


@given(ranks=st.integers(1, 26))
def test_each_table_has_one_rank_and_no_rank_is_without(ranks: int) -> None:
    shares = train_dlrm.split_tables(train_dlrm.CRITEO_ROWS, ranks)
    assert sorted(table for share in shares for table in share) == list(range(26))
    assert all(shares)


def test_text_is_read_over_and_over() -> None:
    text = TEXT.read_bytes()
    data = Bytes(TEXT, 1000, 10_000)
    for index in (0, 7, len(text) // 1000, 9_999):
        tokens, targets = data[index]
        start = index * 1000 % len(text)
        assert bytes(tokens.tolist()) == (text + text)[start : start + 1000]
        assert bytes(targets.tolist()) == (text + text)[start + 1 : start + 1001]


def parse(monkeypatch: pytest.MonkeyPatch, flags: str, world: int) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train_llama.py", *flags.split()])
    return parse_arguments("", world)


def test_defaults_of_a_large_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(monkeypatch, "--size 405b --tp 8 --pp 16 --seq 8192", 8192)
    assert (args.dp, args.batch, args.microbatches, args.ac, args.parallel) == (
        64,
        32,
        32,
        "selective",
        "fsdp",
    )


@pytest.mark.parametrize(
    ("flags", "world", "sentence"),
    [
        ("--tp 3", 8, "a world of 8 does not divide"),
        ("--tp 8", 8, "does not divide the 4 key heads"),
        ("--parallel none", 2, "drift apart"),
        ("--parallel ddp --tp 2", 2, "does not go with --tp"),
        ("--parallel ddp --pp 2", 2, "does not go with --tp and --pp; use fsdp"),
        ("--cp 2 --seq 66", 2, "no multiple of 4"),
        ("--microbatches 2", 1, "needs a pipeline"),
        ("--pp 2 --batch 3 --microbatches 2", 2, "--batch 3 does not divide"),
        ("--pp 2 --schedule zbv --microbatches 3", 2, "a multiple of --pp 2"),
        ("--pp 8 --schedule interleaved1f1b", 8, "too few for 16 pipeline stages"),
        ("--pp 2 --schedule zbv --ac selective", 2, "use full or none"),
        ("--batch 0", 1, "--batch must be at least 1, not 0"),
        ("--data /no/such/file", 1, "there is no such file"),
        ("--size 9b", 1, "invalid choice"),
    ],
)
def test_bad_command_lines_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, world: int, sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, flags, world)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_examples_are_small() -> None:
    assert all(len(path.read_text().splitlines()) < 400 for path in Path(EXAMPLES).glob("*.py"))
