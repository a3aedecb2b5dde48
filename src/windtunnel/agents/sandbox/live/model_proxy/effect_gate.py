"""Services outside that an agent acts on over HTTP, behind the effects journal.

A declared service is reached at ``/effects/<service>/…`` of the sandbox's proxy. Requests that change nothing
(GET, HEAD, OPTIONS) pass through. Any other is an effect: it gets an idempotency key, is made at most once,
and is answered from the journal when the sandbox, brought back to an earlier state, makes it again.

An agent may also mean to do the same thing twice. So equal requests are numbered in the order in which
their answers were received; a sandbox that begins anew after turn k has received those that it had by then.
Two doubts remain: equal requests at the same time count as one, and an answer in flight at the very instant
of a checkpoint may count as received. An ``Idempotency-Key`` of the agent's own settles both.

What the service's status says: 2xx and 3xx, it happened. 4xx, it did not, and may be tried again. 5xx or no
answer: in doubt, see ``live.effects`` for what follows.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from windtunnel.agents.sandbox.live.effects import EffectError, EffectInDoubt, Journal, NotDone
from windtunnel.agents.sandbox.live.model_proxy.conversation import Conversation, Reply
from windtunnel.agents.sandbox.live.model_proxy.events import Bounds, Upstream
from windtunnel.agents.sandbox.live.model_proxy.upstream import (
    Asking,
    UpstreamFault,
    address,
    fault_of,
    reply_headers,
    request_headers,
    timeouts,
)
from windtunnel.agents.sandbox.live.model_proxy.wire import Refused, stays_below
from windtunnel.base.errors import UserError

PREFIX = "/effects/"
HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
AT_ONCE = 16


@dataclass(frozen=True)
class EffectService:
    """A service whose requests are effects. ``idempotent``: it makes a request with the same idempotency key
    only once, so that one in doubt may be repeated. ``key_header``: where it wants that key."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    idempotent: bool = False
    key_header: str = "Idempotency-Key"

    @property
    def upstream(self) -> Upstream:
        return Upstream(self.url, self.headers)


class UnsettledEffect(Exception):
    """The service answered, and its answer leaves open whether the effect happened."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the service answered with status {reply.status}")
        self.reply = reply


class Refusal(NotDone):
    """The service answered that it does not do it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the service answered with status {reply.status}")
        self.reply = reply


class EffectGate:
    """The declared services of all sandboxes, and the journal behind them."""

    def __init__(self, journal: Journal, bounds: Bounds, *, trust_env: bool) -> None:
        self._journal = journal
        self._limit = bounds.reply
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="effects")
        self._client = httpx.Client(timeout=timeouts(bounds), trust_env=trust_env)

    def route(self, asking: Asking, services: Mapping[str, EffectService]) -> tuple[EffectService, Asking]:
        """The service that is meant, and the request as it goes there. Raises Refused."""
        name, _, rest = asking.path.removeprefix(PREFIX).partition("/")
        service = services.get(name)
        if service is None:
            known = ", ".join(sorted(services)) or "none"
            raise Refused(404, "unknown_service", f"no service {name!r} is declared (declared: {known})")
        meant = Asking(asking.method, "/" + rest, asking.headers, asking.body)
        stays_below(service.upstream, meant)
        return service, meant

    async def perform(
        self, box: str, turn: int, service: EffectService, asking: Asking, conversation: Conversation
    ) -> tuple[str, Reply]:
        """Make the effect happen, or give its recorded answer; and the key that names it. Raises Refused and
        UpstreamFault."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._perform, box, turn, service, asking, conversation
        )

    def close(self) -> None:
        """Let calls under way end by themselves; they are in the journal."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _perform(
        self, box: str, turn: int, service: EffectService, asking: Asking, conversation: Conversation
    ) -> tuple[str, Reply]:
        key = self._key(box, service, asking, conversation)
        try:
            made = self._journal.perform(
                box,
                turn,
                f"{asking.method} {service.url}{asking.route}",
                lambda token: self._call(service, asking, token),
                key=key,
                idempotent=service.idempotent,
            )
        except (Refusal, UnsettledEffect) as answer:
            return "", answer.reply
        except EffectInDoubt as error:
            raise Refused(409, "effect_in_doubt", str(error)) from error
        except EffectError as error:
            raise Refused(503, "effect_not_known", str(error)) from error
        except NotDone as error:
            if isinstance(error.__cause__, UpstreamFault):
                raise error.__cause__ from None
            raise
        headers = tuple((name, value) for name, value in made["headers"])
        return key, Reply(made["status"], headers, base64.b64decode(made["body"]))

    def _key(self, box: str, service: EffectService, asking: Asking, conversation: Conversation) -> str:
        """The key of this request: that of the earliest equal one whose answer was not received yet."""
        own = asking.header(service.key_header.lower())
        said = b"\0".join(
            [
                service.url.encode(),
                asking.method.encode(),
                asking.path.encode(),
                own.encode() or asking.header("content-type").encode() + b"\0" + asking.body,
            ]
        )
        base = "http:" + hashlib.blake2b(said, digest_size=16).hexdigest()
        if own:
            return base
        number = 0
        while conversation.has_received(f"{base}#{number}"):
            number += 1
        return f"{base}#{number}"

    def _call(self, service: EffectService, asking: Asking, token: str) -> dict[str, object]:
        kept = tuple((name, value) for name, value in asking.headers if name != service.key_header.lower())
        named = Asking(asking.method, asking.path, (*kept, (service.key_header, token)), asking.body)
        url, exactly = address(service.upstream, named.path)
        try:
            with self._client.stream(
                named.method,
                url,
                extensions=exactly,
                headers=list(request_headers(named, service.upstream)),
                content=named.body,
            ) as response:
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > self._limit:
                        raise UpstreamFault(502, "reply_too_large", "the service's reply is too large")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fault = fault_of(error, service.upstream)
            if fault.sent:
                raise fault from error
            raise NotDone(str(fault)) from fault
        reply = Reply(response.status_code, reply_headers(response.headers.multi_items()), bytes(body))
        if 400 <= reply.status < 500:
            raise Refusal(reply)
        if reply.status >= 500:
            raise UnsettledEffect(reply)
        return {
            "status": reply.status,
            "headers": [list(pair) for pair in reply.headers],
            "body": base64.b64encode(reply.body).decode(),
        }


def checked(services: Mapping[str, EffectService], journal: Journal | None) -> dict[str, EffectService]:
    """``services``, or UserError."""
    if services and journal is None:
        raise UserError("model proxy: services with effects need a journal")
    for name, service in services.items():
        if not name or "/" in name or "?" in name:
            raise UserError(f"model proxy: service {name!r} is not accepted; its name becomes part of a path")
        Upstream(service.url)
    return dict(services)
