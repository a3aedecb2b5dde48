"""The HTTP server: OpenAI's completions and chat, models, health and metrics; the engine runs in a
`link.Link`.

A request whose client has gone is cancelled. On SIGTERM or SIGINT nobody is let in any longer, what runs may
end within `GRACE` seconds, and then the worker is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.api import Answer, Asked, Chat, Completion, Logprobs, Refused
from windtunnel.serving.engine.live.link import Link, Over, Token
from windtunnel.serving.engine.live.tokens import Text, Tokenizer

UNASKED = 1024
"""Tokens of a chat's answer at most, where the client says nothing."""
LARGEST = 8 << 20
"""Bytes of a request's body."""
GRACE = 30
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
REFUSALS = {
    "queue": (429, "queue_full", "the queue is full; try again later"),
    "late": (429, "too_late", "the first token could not have come in time; try again later"),
}
_ERROR = {"content": {"application/json": {"schema": {
    "type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}
}}}}  # fmt: skip
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, **_ERROR}
    for status, what in (
        (400, "Wrong or not served"), (404, "No such model"), (413, "Too large"), (422, "Never sent"),
        (429, "Refused for now"), (500, "Failed"), (503, "Not ready"),
    )
}  # fmt: skip
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}, "application/json": {"schema": {"type": "object"}}}}
}


class _Choice:
    """One text of an answer. ``unit`` of ``job`` decodes it."""

    def __init__(self, job: int, unit: int, tokens: Tokenizer, stops: list[str]) -> None:
        self.job, self.unit, self.text = job, unit, Text(tokens, stops)
        self.said: list[str] = []
        self.logprobs: Logprobs = []
        self.tokens = 0
        self.reason: str | None = None


class Service:
    """Answers for one model, called ``name``."""

    def __init__(
        self, link: Link, tokens: Tokenizer, name: str, objective: tuple[float | None, float | None]
    ) -> None:
        self.link, self.tokens, self.name, self.objective = link, tokens, name, objective
        self.began = int(time.time())
        self._numbers = itertools.count(1)
        self.registry = CollectorRegistry()
        counter, histogram = "windtunnel_requests", "windtunnel_{}_seconds"
        self._ended = Counter(counter, "Requests by how they ended", ["outcome"], registry=self.registry)
        self._tokens = Counter("windtunnel_tokens", "Tokens", ["kind"], registry=self.registry)
        self._first, self._pace, self._total = (
            Histogram(histogram.format(name), what, registry=self.registry, buckets=SECONDS)
            for name, what in (
                ("first_token", "Until the first token"), ("token", "For each further one"),
                ("request", "In all"),
            )
        )  # fmt: skip
        for fact, what in (
            ("running", "Requests that are admitted"), ("waiting", "Requests that are not"),
            ("kv_reserved", "KV tokens that the admitted may come to hold"),
            ("kv_tokens", "There is room for"), ("steps", "Taken"), ("seconds", "Of these steps"),
            ("deciding", "Seconds of them that the scheduler took"),
        ):  # fmt: skip
            gauge = Gauge(f"windtunnel_{fact}", what, registry=self.registry)
            gauge.set_function(lambda fact=fact: link.facts.get(fact, 0.0))  # type: ignore[misc]
        restarts = Gauge("windtunnel_worker_restarts", "Workers that died", registry=self.registry)
        restarts.set_function(lambda: link.restarts)

    async def answer(self, asked: Asked, request: Request) -> Response:
        """The answer, or the beginning of a stream."""
        if self.link.wrong is not None:
            raise Refused(str(self.link.wrong), status=503, code="not_ready")
        work = _Work(self, asked)
        parts = work.parts()
        try:
            first = await _unless_gone(request, anext(parts))
            if asked.stream:
                return StreamingResponse(work.stream(first, parts), media_type="text/event-stream")
            await _unless_gone(request, _all(parts))
        except BaseException:
            await parts.aclose()
            raise
        return JSONResponse(work.whole())

    def number(self) -> int:
        return next(self._numbers)

    def over(self, outcome: str, work: _Work) -> None:
        """Count an answer."""
        now, tokens = time.monotonic(), sum(one.tokens for one in work.choices)
        self._ended.labels(outcome).inc()
        self._tokens.labels("prompt").inc(work.prompt)
        self._tokens.labels("cached").inc(work.cached)
        self._tokens.labels("decoded").inc(tokens)
        self._total.observe(now - work.began)
        if work.first is not None:
            self._first.observe(work.first - work.began)
            if tokens > 1:
                self._pace.observe((now - work.first) / (tokens - 1))


class _Work:
    """One HTTP request: its jobs in the engine, and what is told of them."""

    def __init__(self, service: Service, asked: Asked) -> None:
        self.service, self.asked, self.began = service, asked, time.monotonic()
        self.events: asyncio.Queue[Token | Over] = asyncio.Queue()
        self.answer = Answer(asked)
        self.choices: list[_Choice] = []
        self.jobs: list[dict[str, Any]] = []
        self.prompt = self.cached = 0
        self.first: float | None = None
        if asked.model != service.name:
            what = f"The model `{asked.model}` does not exist; there is `{service.name}`"
            raise Refused(what, status=404, param="model", code="model_not_found")
        if isinstance(asked, Chat):
            try:
                prompts = [service.tokens.chat([one.plain() for one in asked.messages])]
            except UserError as error:
                raise Refused(str(error), param="messages") from error
        else:
            assert isinstance(asked, Completion)
            prompts = [self._tokens(one, "prompt") for one in asked.prompts]
        for prompt in prompts:
            self._job(prompt, secrets.randbits(62) if asked.seed is None else asked.seed)

    def _tokens(self, given: str | list[int], param: str) -> list[int]:
        found = self.service.tokens.encode(given) if isinstance(given, str) else given
        if max(found) >= self.service.link.about["vocabulary"]:
            known = self.service.link.about["vocabulary"]
            raise Refused(f"{param}: token {max(found)} is none of the model's {known}", param=param)
        return found

    def _job(self, prompt: list[int], seed: int) -> None:
        """One prompt's request to the engine, and the choices that come of it."""
        asked, about, number = self.asked, self.service.link.about, self.service.number()
        limit = about["limit"] or 1 << 40
        most = asked.most or max(1, min(UNASKED, limit - len(prompt)))
        needed = len(prompt) + most
        stages: list[Any] = [most]
        units = range(1)
        if asked.branches is not None:
            told = asked.branches
            if (asked.n or 1) > 1 or (asked.stops and told.join is not None):
                field = "n" if (asked.n or 1) > 1 else "stop"
                raise Refused(f"{field} is not served together with branches that are joined", param=field)
            heads = [self._tokens(one, "branches.prompts") if one else [] for one in told.prompts]
            counts = [told.max_tokens] * len(heads)
            join = self._tokens(told.join, "branches.join") if told.join else []
            stages = [
                {"heads": heads, "tokens": counts, "join": join},
                *([most] if told.join is not None else []),
            ]
            units = range(0 if told.join is not None else 1, len(heads) + 1)
            grown = sum(map(len, heads)) + sum(counts) + len(join) + most
            needed = len(prompt) + (
                grown if told.join is not None else max(map(len, heads)) + told.max_tokens
            )
        elif (asked.n or 1) > 1:
            assert asked.n is not None
            stages, units = (
                [{"heads": [[]] * asked.n, "tokens": [most] * asked.n, "join": []}],
                range(1, asked.n + 1),
            )
        if needed > limit:
            raise Refused(
                f"This model's maximum context length is {limit} tokens. However, you requested {needed} "
                f"tokens ({len(prompt)} in the prompt). Please ask for less.",
                param="messages" if isinstance(asked, Chat) else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        promised = asked.objective
        pace = self.service.objective if promised is None else (promised.ttft, promised.tpot)
        temperature = 1.0 if asked.temperature is None else asked.temperature
        self.jobs.append({
            "id": number, "arrival": self.began, "prompt": prompt, "stages": stages, "had": 0, "again": False,
            "sampling": [temperature, 1.0 if asked.top_p is None else asked.top_p, seed, asked.told],
            "objective": pace, "stop": [] if asked.ignore_eos else about["stop"],
        })  # fmt: skip
        self.prompt += len(prompt)
        self.choices += [_Choice(number, unit, self.service.tokens, asked.stops) for unit in units]

    async def parts(self) -> AsyncGenerator[tuple[int, str, Logprobs], None]:
        """What comes of the jobs: choice, text and log-probabilities. Ended early, it cancels them."""
        link, tokens = self.service.link, self.service.tokens
        places = {(one.job, one.unit): index for index, one in enumerate(self.choices)}
        open_jobs, outcome = {one["id"] for one in self.jobs}, "cancelled"
        for job in self.jobs:
            link.submit(job, self.events)
        try:
            while open_jobs:
                event = await self.events.get()
                if isinstance(event, Over):
                    open_jobs.discard(event.job)
                    if event.refused:
                        outcome = "refused"
                        status, code, why = REFUSALS.get(event.refused, (400, "too_large", event.refused))
                        raise Refused(why, status=status, code=code)
                    if event.failed:
                        outcome = "failed"
                        raise Refused(event.failed, status=500, code="worker_failed")
                    continue
                if self.first is None:
                    self.first = time.monotonic()
                index = places[event.job, event.unit]
                choice = self.choices[index]
                if choice.reason is not None:
                    continue
                choice.tokens += 1
                if choice.tokens == 1:
                    self.cached += link.cached(event.job) if event.unit == self._leading(event.job) else 0
                text = "" if event.stopped else choice.text.add(event.token, event.ended)
                told: Logprobs = []
                if event.logprob is not None and not event.stopped:
                    top = [(tokens.decode([one]), value) for one, value in event.top]
                    told = [(tokens.decode([event.token]), event.logprob, top)]
                if event.ended:
                    text += choice.text.rest()
                    choice.reason = "stop" if event.stopped else "length"
                if choice.text.stopped:
                    choice.reason = "stop"
                    if not event.ended:
                        link.end(event.job, event.unit)
                choice.said.append(text)
                choice.logprobs += told
                yield index, text, told
            outcome = "done"
        finally:
            for number in open_jobs:
                link.cancel(number)
            self.service.over(outcome, self)

    def _leading(self, job: int) -> int:
        """Any one unit of a job, the same each time."""
        return min(one.unit for one in self.choices if one.job == job)

    async def stream(
        self, first: tuple[int, str, Logprobs], parts: AsyncGenerator[tuple[int, str, Logprobs], None]
    ) -> AsyncIterator[str]:
        """Server-sent events. What goes wrong after the first is an event, too."""
        begun: set[int] = set()
        told = self.asked.told is not None
        try:
            async for index, text, logprobs in _chained(first, parts):
                choice = self.choices[index]
                if text or choice.reason or logprobs:
                    part = self.answer.part(
                        index, text, logprobs if told else None, choice.reason, index not in begun
                    )
                    begun.add(index)
                    if self.asked.usages:
                        part |= self.answer.usage(*self._used())
                    yield f"data: {json.dumps(part)}\n\n"
            if self.asked.usage:
                yield f"data: {json.dumps(self.answer.last(*self._used()))}\n\n"
        except Refused as error:
            yield f"data: {json.dumps(error.plain())}\n\n"
        finally:
            await parts.aclose()
        yield "data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        told = self.asked.told is not None
        choices = [
            ("".join(one.said), one.logprobs if told else None, one.reason or "length")
            for one in self.choices
        ]
        return self.answer.whole(choices, *self._used())

    def _used(self) -> tuple[int, int, int]:
        return self.prompt, sum(one.tokens for one in self.choices), self.cached


async def _chained(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for one in rest:
        yield one


async def _all(parts: AsyncIterator[Any]) -> None:
    async for _ in parts:
        pass


async def _unless_gone(request: Request, work: Any) -> Any:
    """What ``work`` gives; it is cancelled if the client leaves before."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()
            with suppress(asyncio.CancelledError):
                await doing
            raise Refused("the client has gone", status=499)
        return doing.result()
    finally:
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def build(service: Service) -> ASGIApp:
    """The application; ``service.link`` has been started."""
    app = FastAPI(title="windtunnel serve", docs_url=None, redoc_url=None)

    @app.post("/v1/completions", responses=_ERRORS | _STREAM)
    async def completions(asked: Completion, request: Request) -> Response:
        """OpenAI's completions, and ``branches``."""
        return await service.answer(asked, request)

    @app.post("/v1/chat/completions", responses=_ERRORS | _STREAM)
    async def chat(asked: Chat, request: Request) -> Response:
        """OpenAI's chat, and ``branches``."""
        return await service.answer(asked, request)

    def described() -> dict[str, Any]:
        return {"id": service.name, "object": "model", "created": service.began, "owned_by": "windtunnel"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{model:path}", responses={404: _ERRORS[404]})
    async def model(model: str) -> dict[str, Any]:
        """One model by its name."""
        if model != service.name:
            what = f"The model `{model}` does not exist; there is `{service.name}`"
            raise Refused(what, status=404, param="model", code="model_not_found")
        return described()

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> dict[str, Any]:
        """Whether requests are answered now."""
        if not service.link.ready.is_set():
            why = service.link.wrong or "a worker is being started"
            raise Refused(str(why), status=503, code="not_ready")
        return {"status": "ok", "worker": service.link.pid, "restarts": service.link.restarts}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return PlainTextResponse(generate_latest(service.registry), media_type="text/plain; version=0.0.4")

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        again = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.plain(), error.status, again)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_named(error).plain(), 400)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            Refused(str(error.detail), status=error.status_code).plain(), error.status_code, error.headers
        )

    return _bounded(app)


def _named(error: RequestValidationError) -> Refused:
    """What is wrong, by the name of the first field that is."""
    wrong = error.errors()
    same = [one for one in wrong if one["loc"][1:2] == wrong[0]["loc"][1:2]]
    # of a field that may have several forms, what is wrong within one says more than that it has not another
    first = next((one for one in same if not one["type"].endswith("_type")), wrong[0])
    path = [str(one) for one in first["loc"][1:] if one != "str" and "[" not in str(one)]
    param = path[0] if path else None
    if first["type"] == "json_invalid":
        return Refused(f"The body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return Refused(
            f"Unrecognized or unsupported request argument: {'.'.join(path)}", param=param, code="unsupported"
        )
    return Refused(f"{'.'.join(path) or 'the body'}: {first['msg']}", param=param, code="invalid_value")


def _bounded(app: ASGIApp) -> ASGIApp:
    """``app`` for bodies of `LARGEST` bytes at most."""

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        left = LARGEST
        too_large = HTTPException(413, f"the body is larger than {LARGEST} bytes")

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise too_large
            return message

        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if length.isdigit() and int(length) > LARGEST:
            answer = JSONResponse(Refused(too_large.detail, status=413).plain(), 413, {"Connection": "close"})
            await answer(scope, receive, send)
        else:
            await app(scope, counted, send)

    return bounded
