"""Requests to hold prefix caches against: agents' and chats' sessions from a seed, and traces that tell what
prompts share.

The sessions are synthetic. Their parameters are those that the paper's artefact tells (Marconi, MLSys '25:
SWE-bench agents with at most 50 turns, thinking times of 5 to 10 s and old observations collapsed; ShareGPT
chats of 10 and more turns, LMSys chats of few, typed at 90 words a minute; inputs to 32 K); lengths of turns
are inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as numbers

import numpy as np
from numpy.typing import NDArray

from windtunnel.traces.requests import Requests

Symbols = NDArray[np.int64]
DECODED = 0.02  # seconds a token, so that times of requests do not depend on the cache
TYPED = 0.75 / 1.5  # seconds a token: three quarters of a word, 90 words a minute
LONGEST = 32_768


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A request: its ``prompt`` arrives, and all of it with what was decoded, ``whole``, is known at ``done``
    (seconds). ``tokens``: of the prompt."""

    arrival: float
    done: float
    prompt: Symbols
    whole: Symbols
    tokens: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Sessions of one kind: medians of lognormal lengths in tokens, mean seconds between turns. ``systems``:
    system prompts and their lengths, drawn by Zipf's law. ``collapse``: tokens at which all observations but
    the last five are cut to ``stub`` tokens (0: never)."""

    turns: tuple[int, int]
    systems: tuple[int, ...]
    task: int
    answer: int
    observation: int
    think: float
    typed: bool = False
    collapse: int = 0
    stub: int = 12


KINDS = {
    "agent": Kind((8, 50), (3000, 3400, 2600), 900, 160, 450, 7.5, collapse=24_000),
    "chat long": Kind((10, 24), (900, 400, 200, 60), 60, 240, 60, 10.0, typed=True),
    "chat short": Kind((1, 6), (900, 400, 200, 60), 120, 240, 60, 10.0, typed=True),
}


def sessions(kind: str, count: int, rate: float, seed: int, unit: int = 1) -> list[CacheRequest]:
    """The requests of ``count`` sessions that begin at ``rate`` a second, by arrival; ``unit``: tokens of a
    symbol, to which all lengths are rounded."""
    random, settings, fresh = np.random.default_rng(seed), KINDS[kind], numbers()
    requests: list[CacheRequest] = []
    systems = [_take(fresh, -(-length // unit)) for length in settings.systems]
    popular = 1 / np.arange(1, len(systems) + 1)
    begins = np.cumsum(random.exponential(1 / rate, count))
    for begin in begins.tolist():
        system = systems[int(random.choice(len(systems), p=popular / popular.sum()))]
        requests += _session(settings, system, begin, random, fresh, unit)
    return sorted(requests, key=lambda request: request.arrival)


def _session(
    kind: Kind, system: Symbols, now: float, random: np.random.Generator, fresh: Iterator[int], unit: int
) -> Iterator[CacheRequest]:
    def draw(median: int) -> Symbols:
        return _take(fresh, max(1, round(median * float(random.lognormal(0.0, 0.7)) / unit)))

    parts, observations = [system, draw(kind.task)], []  # which parts are observations
    for _ in range(int(random.integers(*kind.turns, endpoint=True))):
        prompt = np.concatenate(parts)
        if len(prompt) * unit > LONGEST:
            return
        answer = draw(kind.answer)
        done = now + 0.5 + DECODED * len(answer) * unit
        yield CacheRequest(now, done, prompt, np.concatenate([prompt, answer]), len(prompt) * unit)
        reply = draw(kind.observation)
        observations.append(len(parts) + 1)
        parts += [answer, reply]
        now = (
            done + float(random.exponential(kind.think)) + (TYPED * len(reply) * unit if kind.typed else 0.0)
        )
        if kind.collapse and sum(map(len, parts)) * unit > kind.collapse:
            for place in observations[:-5]:
                parts[place] = parts[place][: max(1, kind.stub // unit)]


def _take(fresh: Iterator[int], count: int) -> Symbols:
    return np.fromiter(fresh, np.int64, count)


def traced(trace: Requests) -> list[CacheRequest]:
    """The requests of a trace that tells what prompts share. What was decoded has no ids in it: it is given
    some that do not recur, and the prompt's last block in part goes with it."""
    requests, unknown = [], -1
    columns = trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist()
    for when, tokens, answer, prompt in zip(*columns, trace.ids, strict=True):
        full = prompt[: tokens // trace.unit]
        more = -(-(tokens + answer) // trace.unit) - len(full)
        whole = np.concatenate([full, np.arange(unknown, unknown - more, -1)])
        unknown -= more
        requests.append(CacheRequest(when, when + 0.5 + DECODED * answer, prompt, whole, tokens))
    return requests
