"""What a client of vLLM's server gets for a request that the scheduler sheds: status 503 and the reason.

vLLM's core can only end a request; its server would answer 200 with nothing in it. The scheduler ends it with
`REASON` as its ``stop_reason``, and this ASGI middleware (``vllm serve --middleware
windtunnel.serving.vllm.Refusals``) answers with the status. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Send], Awaitable[None]]

REASON = "the first token could not have come in time; try again later"
STATUS, AGAIN = 503, b"1"
"""Of the answer, and seconds after which the client may ask again."""
REFUSED = f'"stop_reason":"{REASON}"'.encode()
"""In the answer of a request that was shed; a text that a model writes has its quotes escaped."""
EMPTY = b'"content":""'
"""In the first event of a chat's stream, which comes before it is known how the request ends."""
BODY = json.dumps(
    {"error": {"message": REASON, "type": "ServiceUnavailableError", "param": None, "code": STATUS}}
).encode()


class Refusals:
    """See the module."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Message]], send: Send
    ) -> None:
        await self.app(scope, receive, _Answer(send) if scope["type"] == "http" else send)


class _Answer:
    """One answer: held until a message of its body says whether the request was shed."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[Message] = []
        self._decided = self._refused = False

    async def __call__(self, message: Message) -> None:
        if self._refused:
            return
        if self._decided:
            await self._send(message)
            return
        self._pending.append(message)
        body = message.get("body", b"")
        if REFUSED in body:
            self._refused = True
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(BODY)).encode()),
                (b"retry-after", AGAIN),
            ]
            await self._send({"type": "http.response.start", "status": STATUS, "headers": headers})
            await self._send({"type": "http.response.body", "body": BODY})
        elif message["type"] != "http.response.start" and EMPTY not in body:
            self._decided = True
            for pending in self._pending:
                await self._send(pending)
