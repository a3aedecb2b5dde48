"""Who may ask over HTTP: whoever knows the token, and only under a name that is this machine's.

The second check is against DNS rebinding: a page in the user's browser can make a name of its own mean
127.0.0.1, but its requests then carry that name in ``Host``.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = frozenset({"/docs", "/openapi.json"})
"""What describes the interface holds no secret; a browser can open it without the token."""


def guarded(app: ASGIApp, *, token: str, host: str) -> ASGIApp:
    """``app`` for a listener on ``host``: other names are refused, and all but the description needs
    ``token``."""
    expected = f"Bearer {token}".encode()

    async def checking(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        refusal = None
        if not named_here(headers.get(b"host", b"").decode("latin-1"), host):
            sentence = (
                f"sandbox: host name {headers.get(b'host', b'').decode('latin-1')!r} is not accepted here"
            )
            refusal = JSONResponse({"error": sentence, "kind": "denied"}, 403)
        elif scope["path"] not in OPEN and not hmac.compare_digest(
            headers.get(b"authorization", b""), expected
        ):
            sentence = "sandbox: the token is missing or wrong; send 'Authorization: Bearer TOKEN'"
            refusal = JSONResponse(
                {"error": sentence, "kind": "denied"}, 401, headers={"WWW-Authenticate": "Bearer"}
            )
        await (refusal or app)(scope, receive, send)

    return checking


def named_here(given: str, host: str) -> bool:
    """Whether a ``Host`` header names an address, localhost, or the name that was bound."""
    name = given.rsplit("]", 1)[0].removeprefix("[") if given.startswith("[") else given.rsplit(":", 1)[0]
    name = name.lower().rstrip(".")
    if name in ("localhost", host.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
