"""What is cached against what is not: each family of models, with so little memory that its chats go to a
disk and come back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.figures import figure
from benchmarks.harness.rows import Row
from windtunnel.serving.engine.live import families
from windtunnel.serving.engine.live.disk import Disk
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.prefixes import Prefixes
from windtunnel.serving.engine.live.segments import Sequence as Stream

CHATS, TURNS, HEARD, SAID = 3, 4, 96, 6
CLOSE = 1e-5
"""Logits of a prompt that goes on from what was kept may be so far from those of one that does not, as a
share of the largest: sums are taken in another order."""


@dataclass
class _Seen:
    """Of all turns: tokens that differ, the largest difference of logits, prompt tokens and those of them
    that were found."""

    differ: int = 0
    off: float = 0.0
    tokens: int = 0
    found: int = 0


def cached_rows(quick: bool) -> Iterator[Row]:
    """A row for each family that is known by name."""
    torch.set_num_threads(1)
    for family in ("qwen3", "falcon_h1", "qwen3_next") if quick else sorted(families.TINY):
        executor = Executor(families.build(families.tiny(family)))
        whole = CHATS * (TURNS * (HEARD + SAID) * executor.token_bytes + executor.state_bytes)
        with tempfile.TemporaryDirectory() as folder:
            # at one FLOP/s all is brought back, also what such a small model computes faster
            disk = Disk(Path(folder))
            prefixes = Prefixes(executor, "density", whole // 2, None, disk, 1 << 30, 1.0)
            seen = _chats(prefixes)
            there = prefixes.facts()["prefix_disk_bytes"]
            disk.close()
        yield figure(
            "cached", f"{family}: tokens that differ from uncached ones", "", seen.differ,
            f"0, logits within {CLOSE:g}", met=not seen.differ and seen.off <= CLOSE,
            note=f"logits within {seen.off:.1e} of the largest; {seen.found / seen.tokens:.0%} of prompt"
            f" tokens found, {there / 1e3:.0f} kB on the disk at the end",
        )  # fmt: skip


def _chats(prefixes: Prefixes) -> _Seen:
    """Chats in turn, each turn behind all that was said before, answered greedily."""
    seen, random = _Seen(), np.random.default_rng(3)
    begun = random.integers(3, 199, HEARD).tolist()  # what all share
    chats = [list(begun) for _ in range(CHATS)]
    for turn in range(TURNS):
        for number, chat in enumerate(chats):
            chat += random.integers(3, 199, HEARD).tolist()
            chat += _turn(prefixes, chat, float(turn * CHATS + number), seen)
    return seen


def _turn(prefixes: Prefixes, prompt: Sequence[int], now: float, seen: _Seen) -> list[int]:
    executor = prefixes.executor
    found = prefixes.look(prompt, now)
    stream = prefixes.take(found, prompt)
    logits, kept = executor.prefill(stream, prompt[found.depth :], found.keep)
    wanted, _ = executor.prefill(alone := executor.new(), prompt)
    said = _decoded(executor, stream, logits, alone, wanted, seen)
    if found.end == 1:
        kept[stream.depth] = executor.snapshot(stream)
    prefixes.put([*prompt, *said[: stream.depth - len(prompt)]], kept, stream, now)
    prefixes.leave(found)
    for one in (stream, alone):
        executor.free(one)
    seen.tokens, seen.found = seen.tokens + len(prompt), seen.found + found.depth
    return said


def _decoded(
    executor: Executor, stream: Stream, logits: Tensor, alone: Stream, wanted: Tensor, seen: _Seen
) -> list[int]:
    """What is said with nothing cached; both are decoded with it."""
    said: list[int] = []
    for _ in range(SAID):
        seen.off = max(seen.off, float((logits - wanted).abs().max() / wanted.abs().max()))
        seen.differ += int(logits.argmax() != wanted.argmax())
        said.append(int(wanted.argmax()))
        logits, wanted = (executor.decode([one], said[-1:])[0] for one in (stream, alone))
    return said
