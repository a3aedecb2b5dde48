"""The HTTP server: OpenAI's completions and chat, models, health and metrics; the engine runs in a
`thread.EngineThread`.

A request whose client has gone is cancelled. On SIGTERM or SIGINT nobody is let in any longer, what runs may
end within `GRACE` seconds, and then the engine is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import Receive, Scope, Send

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.api import (
    RESPONSES,
    STREAM,
    Body,
    Chat,
    Completion,
    RequestRefused,
    StreamOptions,
    named,
)
from windtunnel.serving.engine.live.loop import Begun, Branches, EngineJob, Event, Token
from windtunnel.serving.engine.live.sampling import Sampling
from windtunnel.serving.engine.live.thread import EngineThread
from windtunnel.serving.engine.live.tokens import Text, Tokenizer
from windtunnel.serving.engine.model import Objective
from windtunnel.serving.engine.policy.step import Unit

LONGEST = 1024
"""Tokens of a chat's answer at most, where the client says nothing."""
LARGEST = 8 << 20
"""Bytes of a request's body."""
GRACE = 30
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
REFUSALS = {
    "queue": (429, "queue_full", "the queue is full; try again later"),
    "late": (429, "too_late", "the first token could not have come in time; try again later"),
}


class Logprob(NamedTuple):
    """Of a token, and of the likeliest ones: text and log-probability. ``offset``: of its choice's text, the
    characters before it."""

    token: tuple[str, float]
    top: list[tuple[str, float]]
    offset: int


class _Choice:
    """One of an answer, which comes by tokens: ``text`` and ``logprobs`` that are not sent yet; ``sent``:
    whether some of it is."""

    def __init__(self, index: int, tokens: Tokenizer, stops: list[str]) -> None:
        self.index, self._of, self._text = index, tokens, Text(tokens, stops)
        self.text, self.logprobs = "", list[Logprob]()
        self.tokens, self.sent = 0, False
        self.reason: str | None = None

    def add(self, event: Token) -> None:
        """One more token, of which one that ends the text is no part."""
        self.tokens += 1
        offset, sampled = self._text.length, event.sampled
        if event.ends != "stop":
            self.text += self._text.add(sampled.token, bool(event.ends))
            if sampled.logprob is not None:
                token, *top = (
                    (self._of.decode([symbol]), value)
                    for symbol, value in ((sampled.token, sampled.logprob), *sampled.top)
                )
                self.logprobs.append(Logprob(token, top, offset))
        if event.ends:
            self.text += self._text.rest()
        self.reason = "stop" if self._text.stopped else event.ends or None


@dataclass(frozen=True, slots=True)
class Defaults:
    """Where a request says nothing: tokens that end an answer, how they are drawn, and what is promised."""

    stop: frozenset[int]
    sampling: Sampling
    objective: Objective


class ModelService:
    """Answers for one model, called ``name``."""

    def __init__(self, engine: EngineThread, tokens: Tokenizer, name: str, defaults: Defaults) -> None:
        self.engine, self.tokens, self.name, self.defaults = engine, tokens, name, defaults
        self.began = int(time.time())
        self.numbers = itertools.count(1)
        self.registry = CollectorRegistry()
        counter, histogram = "windtunnel_requests", "windtunnel_{}_seconds"
        self._ended = Counter(counter, "Requests by how they ended", ["outcome"], registry=self.registry)
        self._tokens = Counter("windtunnel_tokens", "Tokens", ["kind"], registry=self.registry)
        self._first, self._pace, self._total = (
            Histogram(histogram.format(name), description, registry=self.registry, buckets=SECONDS)
            for name, description in (
                ("first_token", "Until the first token"), ("token", "For each further one"),
                ("request", "In all"),
            )
        )  # fmt: skip
        for fact, description in (
            ("running", "Requests that are admitted"), ("waiting", "Requests that are not"),
            ("kv_reserved", "KV tokens that the admitted may come to hold"),
            ("kv_tokens", "There is room for"), ("steps", "Taken"), ("seconds", "Of these steps"),
            ("deciding", "Seconds of them that the scheduler took"),
            ("prefix_bytes", "Cached of prompts in memory"),
        ):  # fmt: skip
            gauge = Gauge(f"windtunnel_{fact}", description, registry=self.registry)
            gauge.set_function(lambda fact=fact: engine.engine.facts()[fact])  # type: ignore[misc]

    def check(self, model: str | None = None) -> None:
        """Raises `RequestRefused` where the engine has ended, and for any other model."""
        if self.engine.wrong is not None:
            raise RequestRefused(str(self.engine.wrong), status=503, code="not_ready")
        if model not in (None, self.name):
            message = f"The model `{model}` does not exist; there is `{self.name}`"
            raise RequestRefused(message, status=404, param="model", code="model_not_found")

    def over(self, work: _Answer) -> None:
        """Count an answer."""
        now, tokens = time.monotonic(), work.tokens
        self._ended.labels(work.outcome).inc()
        self._tokens.labels("prompt").inc(work.prompt)
        self._tokens.labels("cached").inc(work.cached)
        self._tokens.labels("decoded").inc(tokens)
        self._total.observe(now - work.began)
        if work.first is not None:
            self._first.observe(work.first - work.began)
            if tokens > 1:
                self._pace.observe((now - work.first) / (tokens - 1))


class _Answer(Response):
    """One HTTP request: its jobs in the engine, and what comes of them, sent as it comes."""

    def __init__(self, service: ModelService, body: Body) -> None:
        self.background = None
        self.service, self.request, self.began = service, body, time.monotonic()
        self.news, self.text = asyncio.Event(), ""  # whether there are any, and events that are not sent yet
        self.error: Exception | None = None
        self.choices: dict[Unit, _Choice] = {}  # by job and unit, in the order of the answer
        self.jobs: list[EngineJob] = []
        self.prompt = self.cached = 0
        self.first: float | None = None
        self.outcome = "cancelled"
        self._chat, self._options = isinstance(body, Chat), body.stream_options or StreamOptions()
        kind, name = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model,
            "object": name + ".chunk" * (self._chat and bool(body.stream)),
        }  # fmt: skip
        service.check(body.model)
        if isinstance(body, Chat):
            try:
                prompts = [service.tokens.chat([message.plain() for message in body.messages])]
            except UserError as error:
                raise RequestRefused(str(error), param="messages") from error
        else:
            prompts = [self._tokens(prompt, "prompt") for prompt in body.prompts]
        for prompt in prompts:
            self._job(prompt, secrets.randbits(62) if body.seed is None else body.seed)
        self.open = {job.id for job in self.jobs}
        self._line = f"data: {json.dumps(self._head)[:-1]}, "

    def _tokens(self, prompt: str | list[int], param: str) -> list[int]:
        tokens = self.service.tokens.encode(prompt) if isinstance(prompt, str) else prompt
        if max(tokens) >= (vocabulary := self.service.engine.engine.executor.vocabulary):
            raise RequestRefused(
                f"{param}: token {max(tokens)} is none of the model's {vocabulary}", param=param
            )
        return tokens

    def _job(self, prompt: list[int], seed: int) -> None:
        """One prompt's request to the engine, and the choices that come of it."""
        body, defaults, number = self.request, self.service.defaults, next(self.service.numbers)
        limit = self.service.engine.engine.executor.limit or 1 << 40
        most = body.most or max(1, min(LONGEST, limit - len(prompt)))
        stages = self._stages(most)
        units, needed = range(1), len(prompt) + most
        if isinstance(parts := stages[0], Branches):
            joined, grown = len(stages) > 1, [len(head) + parts.tokens[0] for head in parts.heads]
            units = range(0 if joined else 1, len(grown) + 1)
            needed = needed + sum(grown) + len(parts.join) if joined else len(prompt) + max(grown)
        if needed > limit:
            raise RequestRefused(
                f"This model's maximum context length is {limit} tokens. However, you requested {needed} "
                f"tokens ({len(prompt)} in the prompt). Please ask for less.",
                param="messages" if self._chat else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        self.jobs.append(EngineJob(
            number, self.began, tuple(prompt), stages,
            replace(defaults.sampling, seed=seed, logprobs=body.likeliest, **body.drawn),
            frozenset() if body.ignore_eos else defaults.stop,
            defaults.objective if (own := body.objective) is None else Objective.of(own.ttft, own.tpot),
        ))  # fmt: skip
        self.prompt += len(prompt)
        for unit in units:
            self.choices[number, unit] = _Choice(len(self.choices), self.service.tokens, body.stops)

    def _stages(self, most: int) -> tuple[int | Branches, ...]:
        """What is decoded: n answers are branches that begin with nothing; branches that are joined come
        before the answer."""
        branches, count = self.request.branches, self.request.n or 1
        if branches is None:
            return (most,) if count == 1 else (Branches(((),) * count, (most,) * count),)
        joined = branches.join is not None
        if count > 1 or (self.request.stops and joined):
            field = "n" if count > 1 else "stop"
            raise RequestRefused(f"{field} is not served together with branches that are joined", param=field)
        heads = [tuple(self._tokens(head, "branches.prompts")) if head else () for head in branches.prompts]
        behind = tuple(self._tokens(branches.join, "branches.join")) if branches.join else ()
        parts = Branches(tuple(heads), (branches.max_tokens,) * len(heads), behind)
        return (parts, most) if joined else (parts,)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. What is refused before any of it is sent has a status of its own."""
        engine, leaving = self.service.engine, asyncio.create_task(self._left(receive))
        try:
            for job in self.jobs:
                engine.submit(job, self.take)
            await self._news()
            if self.request.stream:
                await self._stream(send)
            else:
                while self.open:
                    await self._news()
                choices = [self._choice(choice) for choice in self.choices.values()]
                content = {**self._head, "choices": choices, **self._used()}
                await JSONResponse(content)(scope, receive, send)
        finally:
            leaving.cancel()
            for number in self.open:
                engine.cancel(number)
            self.service.over(self)

    async def _stream(self, send: Send) -> None:
        """Server-sent events, all of a step in one message. What goes wrong is an event, too."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        try:
            while self.open or self.error is not None:
                if self.text:
                    body, self.text = self.text.encode(), ""
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await self._news()
            if self._options.include_usage:
                self.text += f"{self._line}{json.dumps({'choices': [], **self._used()})[1:]}\n\n"
        except RequestRefused as error:
            self.text += f"data: {json.dumps(error.plain())}\n\n"
        await send({"type": "http.response.body", "body": f"{self.text}data: [DONE]\n\n".encode()})

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.error = RequestRefused("the client has gone", status=499)
        self.news.set()

    async def _news(self) -> None:
        """Until something has come. Raises what went wrong."""
        try:
            await self.news.wait()
        except asyncio.CancelledError:  # by the HTTP server, whose time to end is over
            raise RequestRefused("the server is being stopped", status=503, code="not_ready") from None
        self.news.clear()
        if self.error is not None:
            raise self.error

    def take(self, event: Event) -> None:
        """What comes of the jobs: as text at once, for all that are served by one step one after another."""
        try:
            self._hear(event)
        except Exception as error:  # this answer's alone
            self.error = error
        self.news.set()

    def _hear(self, event: Event) -> None:
        if isinstance(event, Token):
            choice = self.choices[event.job, event.unit]
            if choice.reason is not None:
                return
            self.first = self.first or time.monotonic()
            choice.add(event)
            if choice.reason and not event.ends:  # at a text that it was to stop at
                self.service.engine.end(event.job, event.unit)
            if self.request.stream and (choice.text or choice.logprobs or choice.reason):
                more = {"choices": [self._choice(choice)]}
                if self._options.include_usage and self._options.continuous_usage_stats:
                    more |= self._used()
                self.text += f"{self._line}{json.dumps(more)[1:]}\n\n"
        elif isinstance(event, Begun):
            self.cached += event.cached
        else:
            self.open.discard(event.job)
            if event.refused:
                self.outcome = "refused"
                status, code, why = REFUSALS.get(event.refused, (400, "too_large", event.refused))
                raise RequestRefused(why, status=status, code=code)
            if event.failed:
                self.outcome = "failed"
                raise RequestRefused(event.failed, status=500, code="engine_failed")
            if not self.open:
                self.outcome = "done"

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        """What is not sent yet of a choice, as an object."""
        text, logprobs, choice.text, choice.logprobs = choice.text, choice.logprobs, "", []
        fields: dict[str, Any] = {"text": text}
        if self._chat:
            message = {} if choice.sent else {"role": "assistant"}
            message |= {"content": text} if text or not choice.sent else {}
            fields = {"delta": message} if self.request.stream else {"message": {**message, "refusal": None}}
        choice.sent = True
        details: dict[str, Any] | None = None
        if self.request.likeliest is not None and self._chat:
            tokens = [
                {**_token(*each.token), "top_logprobs": [_token(*other) for other in each.top]}
                for each in logprobs
            ]
            details = {"refusal": None, "content": tokens}
        elif self.request.likeliest is not None:
            details = {
                "tokens": [each.token[0] for each in logprobs],
                "token_logprobs": [each.token[1] for each in logprobs],
                "top_logprobs": [dict(each.top) for each in logprobs],
                "text_offset": [each.offset for each in logprobs],
            }
        return {"index": choice.index, **fields, "logprobs": details, "finish_reason": choice.reason}

    @property
    def tokens(self) -> int:
        """Decoded until now."""
        return sum(choice.tokens for choice in self.choices.values())

    def _used(self) -> dict[str, Any]:
        """What the answer says of tokens."""
        return {"usage": {
            "prompt_tokens": self.prompt, "completion_tokens": self.tokens,
            "total_tokens": self.prompt + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }}  # fmt: skip


def _token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": None}


def build(service: ModelService) -> FastAPI:
    """The application."""
    app = FastAPI(title="windtunnel serve", docs_url=None, redoc_url=None, responses=RESPONSES)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=LARGEST)

    @app.post("/v1/completions", responses=STREAM)
    async def completions(completion: Completion) -> Response:
        """OpenAI's completions, and ``branches``."""
        return _Answer(service, completion)

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat(body: Chat) -> Response:
        """OpenAI's chat, and ``branches``."""
        return _Answer(service, body)

    def described() -> dict[str, Any]:
        return {"id": service.name, "object": "model", "created": service.began, "owned_by": "windtunnel"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model by its name."""
        service.check(model)
        return described()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests are answered now."""
        service.check()
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return PlainTextResponse(generate_latest(service.registry), media_type="text/plain; version=0.0.4")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(named(error).plain(), 400)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        plain_refusal = RequestRefused(str(error.detail), status=error.status_code)
        plain = (error if isinstance(error, RequestRefused) else plain_refusal).plain()
        return JSONResponse(plain, error.status_code, error.headers)

    described_api = app.openapi()
    for form in (Completion, Chat):  # the one name that is accepted
        described_api["components"]["schemas"][form.__name__]["properties"]["model"]["enum"] = [service.name]
    return app
