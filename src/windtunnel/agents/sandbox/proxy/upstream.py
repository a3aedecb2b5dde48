"""The model API behind the proxy: where a request goes, with which key, and what comes back.

A target goes below the upstream's base path byte for byte: what ``%2F`` or ``//`` mean is for the service to
say. The base is a prefix that no request leaves, as with nginx's ``proxy_pass``, so a target that steps up in
some reading of it is refused: percent-encoded, doubly too, with backslashes, or with parameters (``..;x``).

The API key is on the host alone and read at each request, so that it can be changed while sandboxes run; it
is in no sandbox, manifest, log or export. Whatever credential the agent's client sends is dropped then.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from windtunnel.agents.sandbox.proxy import limits
from windtunnel.base.errors import UserError

Headers = tuple[tuple[str, str], ...]
HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
FORWARDED = frozenset({"forwarded", "via", "x-real-ip"})
"""What proxies tell of where a request came from; from inside a sandbox it would be made up."""
NOT_KEPT = frozenset({"set-cookie", "set-cookie2"})
CREDENTIALS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})
"""Headers in which model APIs take a key."""
LARGEST_KEY = 16 * 1024
KEY = re.compile(r"[\x21-\x7e]+")
KEY_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([\x21-\x7e][\x20-\x7e]*)")
PRINTABLE = re.compile(r"[\x21-\x7e]+")
VERSION = re.compile(r"/v\d+$")
DECODINGS = 4
"""How often a path is decoded at most: servers behind servers decode twice, hardly more."""


class ProxyFault(Exception):
    """The agent is answered with an error: its request is refused, or the service could not be reached or
    broke off."""

    def __init__(self, status: int, kind: str, words: str, retry_after: int = 1) -> None:
        super().__init__(words)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after


@dataclass(frozen=True)
class Upstream:
    """A service that is forwarded to. ``key_file``: the file of this host that holds the API key, which is
    never seen inside the sandbox."""

    url: str
    key_file: Path | None = None


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent, read in full. ``path``: as it was sent, with its query."""

    method: str
    path: str
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.split("?", 1)[0]


# --- where it goes ------------------------------------------------------------------------------------------


def split_base(url: str) -> tuple[str, str]:
    """The origin and the base path of an upstream, the latter without a slash at its end.

    Raises UserError for what is no ``http(s)://host[:port][/path]``.
    """
    refused = f"model proxy: upstream {url!r} is not accepted; give http(s)://host[:port][/path]"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and httpx.URL(url).host and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        raise UserError(refused) from None
    if not usable or not PRINTABLE.fullmatch(url):
        raise UserError(refused)
    if "@" in parts.netloc:
        # the words of it are written into every manifest
        raise UserError(
            f"model proxy: the upstream at {parts.hostname} is given with a user name; a secret belongs into "
            "a key file"
        )
    if "?" in url or "#" in url or ".." in unquote(parts.path):
        raise UserError(f"{refused}, whose path is a prefix, without '..', '?' and '#'")
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")


def join_target(base: str, target: str) -> str:
    """``target`` under the base path; a version that ends the base and begins the target is there once."""
    version = VERSION.search(base)
    if version and re.match(re.escape(version[0]) + r"(?=[/?]|$)", target):
        return base + target[len(version[0]) :]
    return base + target


def steps_up(target: str) -> bool:
    """Whether some reading of ``target`` (a path, with or without a query) has a step up, ``..``."""
    path = target.partition("?")[0]
    for _ in range(DECODINGS):
        path = unquote(path, "latin-1")
    return ".." in re.split(r"[/\\;]", path)


# --- with which key -----------------------------------------------------------------------------------------


def read_key(file: Path) -> str:
    """The one line of ``file``. Raises UserError, without a word of what it holds, unless it is a file that
    only this process's user may read."""
    try:
        # without O_NONBLOCK, opening a FIFO would wait for its writer
        with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as key:
            status = os.fstat(key.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"model proxy: key file {file} is not a regular file")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise UserError(
                    f"model proxy: key file {file} must belong to user {os.geteuid()}, the daemon's, and "
                    "be readable by nobody else; chown it, and chmod 600"
                )
            text = key.read(LARGEST_KEY + 1).decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise UserError(f"model proxy: key file {file} cannot be read: {error.strerror}") from None
    if len(text) > LARGEST_KEY or (not KEY.fullmatch(text) and not KEY_HEADER.fullmatch(text)):
        raise UserError(
            f"model proxy: key file {file} must hold one line: a key, or a header as 'Name: value'"
        )
    return text


def key_header(key: str, route: str, sent_names: Iterable[str]) -> tuple[str, str]:
    """The header that holds ``key``: the one that the file names; or the API's, known by the path and by
    ``sent_names``, the headers of the client: ``x-api-key`` (Anthropic), ``api-key`` (Azure), else a bearer
    token (OpenAI and those that speak like it)."""
    header = KEY_HEADER.fullmatch(key)
    if header:
        return header[1].lower(), header[2]
    if "anthropic-version" in sent_names or re.search(r"/messages(/|$)", route):
        return "x-api-key", key
    if "api-key" in sent_names:
        return "api-key", key
    return "authorization", f"Bearer {key}"


# --- and what comes back ------------------------------------------------------------------------------------


def new_client() -> httpx.AsyncClient:
    """The connections to model services."""
    timeout = httpx.Timeout(limits.SILENCE, connect=limits.CONNECT, pool=limits.CONNECT)
    pool = httpx.Limits(max_connections=limits.OPEN_TOTAL, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=timeout, limits=pool)


@asynccontextmanager
async def forward(
    client: httpx.AsyncClient, upstream: Upstream, request: AgentRequest
) -> AsyncIterator[httpx.Response]:
    """The service's response, its body not yet read. Raises ProxyFault, also for what happens while the
    body is read within the block."""
    origin, base = split_base(upstream.url)
    # httpx would normalise a URL; this is what it is told to ask for instead
    target = {"target": join_target(base, request.path).encode("latin-1")}
    try:
        sent = httpx.Request(
            request.method,
            origin,
            headers=list(_request_headers(request, upstream)),
            content=request.body,
            extensions={"timeout": client.timeout.as_dict(), **target},
        )
        response = await client.send(sent, stream=True)
        try:
            yield response
        finally:
            await response.aclose()
    except httpx.HTTPError as error:
        raise _fault_of(error, httpx.URL(upstream.url).host) from error


def reply_headers(response: httpx.Response) -> Headers:
    """What goes to the agent of a reply's headers."""
    sent_names = tuple((name.lower(), value) for name, value in response.headers.multi_items())
    left = HOP_BY_HOP | NOT_KEPT | named_in_connection(sent_names)
    return tuple((name, value) for name, value in sent_names if name not in left and name[:6] != "proxy-")


def fault_body(kind: str, words: str) -> bytes:
    """An error as both OpenAI's and Anthropic's clients understand it."""
    return json.dumps({"type": "error", "error": {"type": kind, "message": f"windtunnel: {words}"}}).encode()


def _request_headers(request: AgentRequest, upstream: Upstream) -> Headers:
    """What goes to the upstream of an agent's headers, and what the host adds. Raises ProxyFault where the
    key cannot be read."""
    left, own = HOP_BY_HOP | FORWARDED | {"host", "content-length", "expect"}, dict[str, str]()
    if upstream.key_file is not None:
        try:
            key = read_key(upstream.key_file)
        except UserError as error:
            words = str(error).removeprefix("model proxy: ")
            raise ProxyFault(503, "key_unreadable", words) from None
        own = dict([key_header(key, request.route, dict(request.headers))])
        left |= CREDENTIALS | own.keys()
    left |= named_in_connection(request.headers)
    forwarded = [
        (name, value)
        for name, value in request.headers
        if name not in left and not name.startswith(("x-forwarded-", "proxy-"))
    ]
    return (*forwarded, *own.items())


def named_in_connection(headers: Iterable[tuple[str, str]]) -> set[str]:
    return {
        part.strip().lower() for name, value in headers if name == "connection" for part in value.split(",")
    }


def _fault_of(error: Exception, where: str) -> ProxyFault:
    words = str(error) or type(error).__name__
    if isinstance(error, httpx.PoolTimeout):
        return ProxyFault(503, "overloaded", "too many requests are under way")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ProxyFault(502, "upstream_unreachable", f"{where} cannot be reached: {words}")
    if isinstance(error, httpx.TimeoutException):
        return ProxyFault(504, "upstream_timeout", f"{where} did not answer in time: {words}")
    return ProxyFault(502, "upstream_broke_off", f"{where} broke off: {words}")
