"""The engine over real models: what it writes is what the model alone would write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.families import load
from windtunnel.serving.engine.live.loop import (
    ROUNDED,
    Branches,
    EngineJob,
    Over,
    ServingEngine,
    Token,
)
from windtunnel.serving.engine.live.prefixes import Prefixes
from windtunnel.serving.engine.live.sampling import Sampling
from windtunnel.serving.engine.live.tokens import ByteTokens, LocalTokens, Text
from windtunnel.serving.engine.model import Objective, StepTime

TIME = StepTime(1e-3, 1e-5, 1e-7, 1e-5, 1e-9)
BASE = tuple(3 + (7 * at) % 251 for at in range(40))


@pytest.fixture(scope="module", params=["tiny-attention", "tiny-hybrid"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(request.param)
    torch.set_num_threads(threads)


def alone(executor: Executor, prompt: list[int], count: int) -> list[int]:
    """What the model says to a prompt when nobody else is there."""
    return list(_alone(executor, tuple(prompt), count))


@cache
def _alone(executor: Executor, prompt: tuple[int, ...], count: int) -> list[int]:
    stream, said = executor.new(), []
    logits = executor.prefill(stream, prompt)
    for _ in range(count):
        said.append(int(logits.argmax()))
        logits = executor.decode([stream], [said[-1]])[0]
    executor.free(stream)
    return said


def run(
    engine: ServingEngine, jobs: list[EngineJob], during: Callable[[int], None] = lambda step: None
) -> dict[tuple[int, int], list[int]]:
    """All tokens by request and unit; two jobs come with each step."""
    said: dict[tuple[int, int], list[int]] = {}
    waiting, step = list(jobs), 0
    while engine.busy or waiting:
        for job in [waiting.pop(0) for _ in range(min(2, len(waiting)))]:
            engine.add(job)
        for event in engine.step():
            assert not isinstance(event, Over) or not event.failed
            if isinstance(event, Token):
                said.setdefault((event.job, event.unit), []).append(event.sampled.token)
        during(step := step + 1)
    return said


def serving_engine(executor: Executor, **fields: object) -> ServingEngine:
    return ServingEngine(executor, TIME, **{"rows": 4, "kv": 1 << 20, "chunk": 16, **fields})  # type: ignore[arg-type]


def jobs() -> list[EngineJob]:
    now = time.monotonic()
    plain = [EngineJob(at, now, BASE[: 20 + 5 * (at % 3)] + (9 + at,) * at, (8,)) for at in range(5)]
    parts = Branches(((5, 6), (7,), ()), (5, 3, 6), (9, 9))
    return [
        *plain,
        EngineJob(5, now, BASE, (4, parts, 5)),
        EngineJob(6, now, BASE[:1], (Branches(((), ()), (4, 2)), 3)),
    ]


@pytest.mark.parametrize(("rules", "policy"), [("none", "off"), ("three", "eager"), ("block16", "taper")])
def test_batched_chunked_cached_and_branched_answers_are_those_of_the_model_alone(
    executor: Executor, rules: str, policy: str
) -> None:
    before = executor.allocated
    prefixes = Prefixes(executor, rules, 1 << 18)
    engine = serving_engine(executor, prefixes=prefixes, branching=policy)
    for _ in range(2):  # the second time from what the first one left
        said = run(engine, jobs())
        for job in jobs()[:5]:
            assert said[job.id, 0] == alone(executor, list(job.prompt), 8)
        for number, begin in ((5, 4), (6, 0)):
            job = jobs()[number]
            known = list(job.prompt) + alone(executor, list(job.prompt), begin)
            parts = next(stage for stage in job.stages if isinstance(stage, Branches))
            for unit, (head, count) in enumerate(zip(parts.heads, parts.tokens, strict=True), 1):
                assert said[number, unit] == alone(executor, known + list(head), count)
            for unit, head in enumerate(parts.heads, 1):
                known += [*head, *said[number, unit]]
            last = job.stages[-1]
            assert isinstance(last, int)
            assert said[number, 0][begin:] == alone(executor, known + list(parts.join), last)
    assert not executor.sequences and engine.scheduler.reserved == 0
    assert rules == "none" or prefixes.tree.used > 0
    assert executor.allocated >= before


def test_a_drawn_answer_does_not_depend_on_who_else_is_there(executor: Executor) -> None:
    drawn = [
        EngineJob(at, time.monotonic(), BASE[: 9 + at], (6,), Sampling(0.9, 0.8, seed=at, logprobs=1))
        for at in range(6)
    ]
    together = run(serving_engine(executor), drawn)
    for job in drawn:
        assert run(serving_engine(executor, rows=1, chunk=5), [job])[job.id, 0] == together[job.id, 0]
    others = run(serving_engine(executor), [EngineJob(0, 0.0, BASE[:9], (6,), Sampling(0.9, 0.8, seed=99))])
    assert others[0, 0] != together[0, 0]


def test_who_leaves_is_freed_and_who_comes_too_late_or_too_much_is_told(executor: Executor) -> None:
    engine = serving_engine(executor, queue=3, rows=1)
    for job in jobs():
        engine.add(job)
    engine.add(EngineJob(7, 0.0, BASE, (1 << 20,)))
    refused = [event.refused for event in engine.step() if isinstance(event, Over)]
    assert refused[:-1] == ["queue"] * 4 and "there is room for" in refused[-1]
    for job in jobs()[:3]:
        engine.cancel(job.id)
    assert not engine.busy and not executor.sequences and engine.scheduler.reserved == 0
    engine.add(EngineJob(8, time.monotonic() - 9, BASE, (3,), objective=Objective(ttft=1.0)))
    assert engine.step() == [Over(8, refused="late")] and not engine.busy


def test_what_requests_hold_never_exceeds_what_was_promised(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step is computed and after it, free slots and copied states included; and a good part of it
    is used."""
    executor, most = Executor(executor.ready.model), [0]  # one that holds nothing of other tests
    kv = executor.state_bytes * 10 + executor.token_bytes * 600
    compute = executor._pass

    def watched(*given: Any, **more: Any) -> torch.Tensor:
        most.append(executor.allocated)
        return compute(*given, **more)

    monkeypatch.setattr(executor, "_pass", watched)
    for rules, policy, kept in (("none", "eager", 0), ("three", "off", 1 << 16)):
        engine = serving_engine(
            executor, rows=64, kv=kv, chunk=24, branching=policy, prefixes=Prefixes(executor, rules, kept)
        )
        parts = Branches(((), (5,)), (9, 17))
        more = [
            EngineJob(7 + at, 0.0, BASE[: 1 + 7 * at % 40], (3 + 5 * at % 30, parts, 1)) for at in range(6)
        ]
        run(engine, [*jobs(), *more], lambda step: most.append(executor.allocated))
        assert not executor.sequences
        assert kv / 4 < max(most) <= kv + kept * ROUNDED
        most.clear()


def test_a_step_that_fails_ends_those_who_took_part_in_it_alone(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving_engine(executor, rows=2, chunk=64)
    first, second, third = (EngineJob(at, time.monotonic(), BASE, (5,)) for at in range(3))
    engine.add(first)
    engine.step()

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "step", broken)
        engine.add(second)
        over = [event for event in engine.step() if isinstance(event, Over)]
    assert {event.job for event in over} == {0, 1}
    assert all("out of memory" in event.failed for event in over) and not executor.sequences
    assert run(engine, [third])[2, 0] == alone(executor, list(BASE), 5)


def test_a_fork_that_fails_ends_all_who_were_to_fork(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one for whose branches nothing was left of the chunk."""
    engine, parts = serving_engine(executor, rows=8, chunk=1), Branches(((5,), (6,)), (3, 3))
    for number, serial in enumerate((3, 2)):  # so that both fork in the fourth step
        engine.add(EngineJob(number, time.monotonic(), BASE[:1], (serial, parts, 2)))
    for _ in range(3):
        engine.step()

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(executor, "fork", broken)
    over = [event for event in engine.step() if isinstance(event, Over)]
    assert [event.job for event in over] == [0, 1] and all("out of memory" in event.failed for event in over)
    assert not engine.busy and not executor.sequences


def test_stop_strings_and_characters_in_parts() -> None:
    tokens = ByteTokens()
    text = Text(tokens, ["END", "DONE"])
    said = [text.add(token) for token in tokens.encode("aé ENDE DO")] + [text.rest()]
    assert "".join(said) == "aé " and text.stopped
    text = Text(tokens, ["END"])
    assert "".join(text.add(token) for token in tokens.encode("é EN")) + text.rest() == "é EN"


SIGNS = "ab é風\U0001f600\ud800"


@given(st.text(SIGNS, max_size=30), st.lists(st.text(SIGNS, min_size=1, max_size=4), max_size=3))
@settings(max_examples=60)
def test_text_in_parts_is_the_text_up_to_the_first_stop(words: str, stops: list[str]) -> None:
    tokens = ByteTokens()
    words = words.encode("utf-8", "replace").decode()
    text = Text(tokens, stops)
    said = "".join(text.add(token) for token in tokens.encode(words)) + text.rest() if words else ""
    ends = [at for at in map(words.find, stops) if at >= 0]
    assert said == (words[: min(ends)] if ends else words)


def test_a_directory_brings_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the wing the wind the tunnel"] * 9,
        tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    local = LocalTokens(tmp_path)
    words = "the wind é 風 the wing"
    text = Text(local, [])
    assert "".join(text.add(token) for token in local.encode(words)) + text.rest() == words
    assert local.decode(local.chat([{"role": "user", "content": "wing"}])) == "[user]wing"
