"""Policies in vLLM beside vLLM's own, and the own engine beside vLLM's server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.measure import in_turn, quantile, ratios
from benchmarks.harness.rows import Row, figure
from benchmarks.serving.vllm.servers import (
    HYBRID,
    HYBRID_WORDS,
    Answer,
    Live,
    PromptRequest,
    Variant,
    prompts,
    servers,
)
from windtunnel.base.plain import from_plain
from windtunnel.serving.engine.model import InferenceRequest, Objective, Serial
from windtunnel.serving.engine.policy.step import StepLimits
from windtunnel.serving.engine.twin.world import serve
from windtunnel.serving.vllm.calibrate import WORDS, fit_log
from windtunnel.serving.vllm.settings import VllmSettings
from windtunnel.store import eventlog

LOADS = (0.8, 1.0, 1.2)
PROMPT, TOKENS, TOGETHER = 96, 24, 8
BRANCHES, TURNS, ROWS = 6, 5, 8


def closed(
    count: int, temperature: float = 0.0, length: int = PROMPT, tokens: int = TOKENS
) -> list[PromptRequest]:
    """So many requests at once, the same each time but for their prompts' first token."""
    random = np.random.default_rng(1)
    return [
        PromptRequest(0.0, prompt, tokens, temperature=temperature)
        for prompt in prompts(count, length, random)
    ]


def speed_rows(quick: bool) -> Iterator[Row]:
    """Tokens a second of both, and what the twin says of ours."""
    count, repeats = (8, 3) if quick else (48, TURNS)
    with servers({"vllm": Variant(), "ours": Variant(VllmSettings(admission="wait"))}) as up:
        same = [live.ask(closed(count), TOGETHER)[0] for live in up.values()]  # warm, too
        same_tokens = [[answer.tokens for answer in answers] for answers in same]
        fresh = iter(range(1, 1000))

        def speed(live: Live) -> tuple[float, float]:
            requests = [
                PromptRequest(0.0, [next(fresh) % 4000 + 3, *request.prompt[1:]], TOKENS)
                for request in closed(count)
            ]
            before = live.spent()
            answers, seconds = live.ask(requests, TOGETHER)
            tokens = sum(answer.count for answer in answers)
            return tokens / seconds, tokens / (live.spent() - before)

        results = in_turn({name: partial(speed, live) for name, live in up.items()}, repeats)
        for place, words in ((0, "tokens/s"), (1, "tokens a processor second")):
            ours, own = ([result[place] for result in results[name]] for name in ("ours", "vllm"))
            note = f"{median(ours):.1f} against {median(own):.1f}"
            yield figure(f"ours against vLLM's own, {words}", "x", ratios(ours, own), ">= 0.97", note=note)
        equal = sum(tokens == other for tokens, other in zip(*same_tokens, strict=True))
        yield figure("requests with the same tokens", "", equal / count, "1")
        yield from twin_rows(up["ours"], count)


def twin_rows(live: Live, count: int) -> Iterator[Row]:
    """A stretch of requests, and the twin given every other of its steps: how fast a host is that others use
    changes within seconds."""
    random = np.random.default_rng(2)
    _, seconds = live.ask(closed(count), TOGETHER)
    after = np.cumsum(random.exponential(1.5 * seconds / count, 2 * count))
    begin = len(eventlog.read(live.events))
    live.ask(
        [
            PromptRequest(float(at), prompt, TOKENS)
            for at, prompt in zip(after, prompts(len(after), PROMPT, random), strict=True)
        ]
    )
    events = eventlog.read(live.events)
    limits = from_plain(StepLimits, next(event["limits"] for event in events if event["kind"] == "engine"))
    events = events[begin:]
    time, error = fit_log([event for event in events if event["kind"] == "step"][::2])
    arrivals = [
        from_plain(InferenceRequest, event["request"]) for event in events if event["kind"] == "arrives"
    ]
    requests = sorted(arrivals, key=lambda request: request.arrival)
    first, end = live_times(events, requests)
    served = serve(requests, limits, time)
    for name, measured, twin in (
        ("TTFT", first - served.arrival, served.first - served.arrival),
        ("TPOT", (end - first) / (TOKENS - 1), (served.end - served.first) / (TOKENS - 1)),
    ):
        for share in (0.5, 0.95):
            live_time, twin_time = (quantile(times.tolist(), share) for times in (measured, twin))
            words = f"twin: {name} p{share * 100:g} in the scheduler"
            note = f"step model {error:.0%} off on average"
            yield figure(words, "s", live_time, "within 15 %", emulated=twin_time, note=note)


def live_times(
    events: Sequence[eventlog.Event], requests: Sequence[InferenceRequest]
) -> tuple[np.ndarray, np.ndarray]:
    """When each request had its first and its last token, as the scheduler saw it."""
    place = {request.id: at for at, request in enumerate(requests)}
    left = [request.prompt for request in requests]
    first, end = (np.full(len(requests), np.nan) for _ in range(2))
    for event in events:
        if event["kind"] != "step":
            continue
        for number, depth in event["admitted"]:
            if number in place:
                left[place[number]] -= depth
        for number, _, tokens in event["computed"]:
            if number in place:
                at = place[number]
                left[at] -= tokens
                if left[at] <= 0:
                    first[at] = np.fmin(first[at], event["ended"])
                    end[at] = event["ended"]
    return first, end


def objectives_rows(quick: bool) -> Iterator[Row]:
    """Requests that come at their own pace, each with an objective, around what the server can do. It decodes
    `ROWS` sequences at once, so that requests wait; the first token is due within the time of a request that
    is alone. vLLM's ``priority`` serves the earliest due first."""
    count, repeats = (24, 1) if quick else (48, 3)
    variants = {
        "ours": Variant(VllmSettings(policy="off")),
        "fcfs": Variant(),
        "priority": Variant(words="--scheduling-policy priority"),
    }
    words = WORDS.replace("--max-num-seqs 64", f"--max-num-seqs {ROWS}")
    with servers(variants, words) as up:
        for live in up.values():
            live.ask(closed(2 * ROWS))
        ttft = median(up["fcfs"].ask(closed(1))[1] for _ in range(5))
        capacity = median(completed(up["fcfs"]) for _ in range(3))
        for share in LOADS:
            random = np.random.default_rng(int(10 * share))
            after = np.cumsum(random.exponential(1 / (share * capacity), count)).tolist()
            requests = [
                PromptRequest(at, prompt, TOKENS, ttft=ttft, priority=int(1e3 * at))
                for at, prompt in zip(after, prompts(count, PROMPT, random), strict=True)
            ]
            results = in_turn({name: partial(answers, live, requests) for name, live in up.items()}, repeats)
            shares = {name: share_in_time(turns, ttft, inf) for name, turns in results.items()}
            refused = sum(answer.refused for turn in results["ours"] for answer in turn)
            own = max(shares["fcfs"], shares["priority"])
            words = ", ".join(f"{name} {shares[name]:.2f}" for name in ("fcfs", "priority"))
            yield figure(
                f"kept at {share:g} of capacity: ours", "share", shares["ours"],
                f"{'>=' if share < 1 else '>'} {own:.2f}", emulated=emulated(up["ours"], requests),
                note=f"{words}; {refused} of {repeats * count} refused; {capacity:.2f} requests/s, first"
                f" token within {ttft:.2f} s",
            )  # fmt: skip


def completed(live: Live) -> float:
    """Requests a second that the server completes while more wait than it can serve: however many more come,
    it completes no more. Neither the first requests count, beside which others are still read, nor the last
    ones, beside which nothing is left to do."""
    answers, _ = live.ask(closed(8 * ROWS))
    ends = sorted(answer.end for answer in answers)[ROWS:-ROWS]
    return (len(ends) - 1) / (ends[-1] - ends[0])


def emulated(live: Live, workload: Sequence[PromptRequest]) -> float:
    """The share that the twin keeps of the same requests, by the steps that the server took until now."""
    events = eventlog.read(live.events)
    limits = from_plain(StepLimits, next(event["limits"] for event in events if event["kind"] == "engine"))
    time, _ = fit_log(events)
    requests = [
        InferenceRequest(
            place, request.after, PROMPT, (Serial(request.tokens),), Objective(request.ttft, request.tpot)
        )
        for place, request in enumerate(workload)
    ]
    served = serve(requests, limits, time)
    return float(np.mean(served.first - served.arrival <= workload[0].ttft))


def engine_rows(quick: bool) -> Iterator[Row]:
    """Tokens a second of the own engine with one thread against vLLM's server: bind that to one core, too."""
    repeats = 1 if quick else TURNS
    with servers({"vllm": Variant(), "engine": Variant(engine=True)}) as up:
        for words, temperature, length, tokens, count, together in (
            ("greedy, 128 in, 48 out", 0.0, 128, 48, 32, 16),
            ("temperature 1, 128 in, 48 out", 1.0, 128, 48, 32, 16),
            ("greedy, 700 in, 16 out", 0.0, 700, 16, 16, 8),
        ):
            for live in up.values():
                live.ask(closed(4, temperature, length, tokens))
            fresh = iter(range(1, 4000))

            def speed(
                live: Live, requests: Sequence[PromptRequest], at_once: int, fresh: Iterator[int]
            ) -> float:
                some = [
                    replace(request, prompt=[next(fresh) + 3, *request.prompt[1:]]) for request in requests
                ]
                answers, seconds = live.ask(some, at_once)
                return sum(answer.count for answer in answers) / seconds

            requests = closed(count, temperature, length, tokens)
            results = in_turn(
                {name: partial(speed, live, requests, together, fresh) for name, live in up.items()}, repeats
            )
            over, note = ratios(results["engine"], results["vllm"]), "{:.0f} against {:.0f} tokens/s"
            note = note.format(median(results["engine"]), median(results["vllm"]))
            yield figure(f"own engine against vLLM: {words}", "x", over, ">= 0.9", note=note)


def share_in_time(turns: Sequence[Sequence[Answer]], ttft: float, tpot: float) -> float:
    return median(sum(answer.in_time(ttft, tpot) for answer in answers) / len(answers) for answers in turns)


def branches_rows(quick: bool) -> Iterator[Row]:
    """Half of the requests have several answers: how many of them run in a step, by policy."""
    count, repeats = (10, 1) if quick else (32, 3)
    names = ("off", "eager", "taper")
    with servers({name: Variant(VllmSettings(name, "wait")) for name in names}) as up:
        for live in up.values():
            live.ask(closed(count), TOGETHER)
        tpot = 2.5 * median(up["eager"].ask(closed(1))[1] for _ in range(5)) / TOKENS
        seconds = median(up["eager"].ask(mixed(count, 0.0, 0), TOGETHER)[1] for _ in range(2))
        for share in (0.4, 0.7, 1.0):
            requests = [
                replace(request, ttft=60 * tpot, tpot=tpot)
                for request in mixed(count, seconds / share / count, int(10 * share))
            ]
            results = in_turn({name: partial(answers, live, requests) for name, live in up.items()}, repeats)
            shares = {name: share_in_time(results[name], 60 * tpot, tpot) for name in names}
            others = max(shares["off"], shares["eager"])
            yield figure(
                f"kept at {share:g} of capacity: taper", "share", shares["taper"], f">= {others:.2f}",
                note=f"off {shares['off']:.2f}, eager {shares['eager']:.2f}; a token within"
                f" {tpot * 1e3:.0f} ms",
            )  # fmt: skip


def answers(live: Live, requests: Sequence[PromptRequest]) -> list[Answer]:
    return live.ask(requests)[0]


def mixed(count: int, gap: float, seed: int) -> list[PromptRequest]:
    random = np.random.default_rng(seed)
    after = np.cumsum(random.exponential(gap, count)) if gap else np.zeros(count)
    answers = [BRANCHES if at % 2 else 1 for at in range(count)]
    return [
        PromptRequest(float(at), prompt, TOKENS, many, 1.0 if many > 1 else 0.0)
        for at, prompt, many in zip(after, prompts(count, PROMPT, random), answers, strict=True)
    ]


def hybrid_rows(quick: bool) -> Iterator[Row]:
    """Chats with a hybrid model that begin alike: what the prefix cache has of them, by who decides which
    states are kept."""
    repeats = 1 if quick else 3
    states = Variant(VllmSettings(admission="wait", prefix_cache="three-lru"))
    with servers({"vllm": Variant(), "ours": states}, HYBRID_WORDS, hybrid=True) as up:
        seeds = {name: iter(range(repeats)) for name in up}

        def chat(name: str) -> tuple[float, float, list[list[int]]]:
            before = up[name].cached()
            answers = chats(up[name], next(seeds[name]))
            hits, queries = (after - at for after, at in zip(up[name].cached(), before, strict=True))
            first = median(answer.first - answer.sent for answer in answers)
            return hits / queries, first, [answer.tokens[0] for answer in answers]

        results: dict[str, list[Any]] = in_turn({name: partial(chat, name) for name in up}, repeats)
        for quantity, place, unit, than in (
            ("prompt tokens found", 0, "share", ">"), ("first token, median", 1, "s", "<"),
        ):  # fmt: skip
            ours, own = ([result[place] for result in results[name]] for name in ("ours", "vllm"))
            goal, words = f"{than} {median(own):.3f}", f"{quantity}: ours against vLLM's own"
            yield figure(words, unit, ours, goal, note="the target is vLLM's own")
        pairs = list(zip(results["ours"], results["vllm"], strict=True))
        equal = sum(ours[2] == own[2] for ours, own in pairs)
        yield figure("turns with the same tokens", "", equal / len(pairs), "1")


def chats(live: Live, seed: int) -> list[Answer]:
    """Three chats of four turns behind the same beginning, a request at a time."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return list(map(int, random.integers(3, HYBRID["vocab_size"], count)))

    answers, shared = [], tokens(800)
    prompts_of_chats = [shared + tokens(300) for _ in range(3)]
    for _ in range(4):
        for prompt in prompts_of_chats:
            (answer,), _ = live.ask([PromptRequest(0.0, list(prompt), 8)])
            answers.append(answer)
            prompt += answer.tokens[0] + tokens(200)
    return answers
