"""Where a request goes: the upstream's base path, and after it the agent's target, byte for byte.

Nothing of a target is decoded, resolved or shortened on the way: what ``%2F``, ``//`` or ``..`` mean is for
the service to say. What it may say has one bound, as nginx's ``proxy_pass`` and LiteLLM's ``api_base`` have
it: the base is a prefix that no request leaves. So a target that some reading of it would take above where it
began is refused. What counts as a reading is meant broadly: percent-encoded, doubly too, with backslashes, or
with parameters (``..;x``).
"""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from windtunnel.base.errors import UserError

VERSION = re.compile(r"/v\d+$")
PRINTABLE = re.compile(r"[\x21-\x7e]+")
DECODINGS = 4
"""How often a part is decoded at most: servers behind servers decode twice, hardly more."""


def leaves(url: str, target: str) -> bool:
    """Whether some reading of ``target`` (a path, with or without a query) passes above the base ``url``."""
    return _rises(_below(checked_base(url)[1], target))


def _rises(path: str) -> bool:
    depth = 0
    for part in path.split("?", 1)[0].split("/"):
        whole = part.encode("latin-1")
        for _ in range(DECODINGS):
            whole = unquote_to_bytes(whole)
        names = [name.split(b";")[0] for name in re.split(rb"[/\\]", whole)]
        ups = names.count(b"..")
        # a part counts as one step down at most, and as none where servers might merge it with the next
        depth += -ups if ups else any(name not in (b"", b".") for name in names)
        if depth < 0:
            return True
    return False


def checked_base(url: str) -> tuple[str, str]:
    """The origin and the base path of an upstream, the latter without a slash at its end.

    Raises UserError for what is no ``http(s)://host[:port][/path]``.
    """
    if not url.startswith(("http://", "https://")) or not url.split("://")[1]:
        raise UserError(f"model proxy: upstream {url!r} is not accepted; give http(s)://host[/path]")
    try:
        parts = urlsplit(url)
        host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        host = False
    if not host or not PRINTABLE.fullmatch(url):
        raise UserError(f"model proxy: upstream {url!r} is not accepted; give http(s)://host[:port][/path]")
    if "@" in parts.netloc:
        # the words of it are written into every manifest
        raise UserError(
            f"model proxy: the upstream at {parts.hostname} is given with a user name; a secret belongs into "
            "a key file"
        )
    if "?" in url or "#" in url or ".." in unquote(parts.path):
        raise UserError(
            f"model proxy: upstream {url!r} is not accepted; its path is a prefix, without '..', '?' and '#'"
        )
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")


def joined(base: str, target: str) -> str:
    """``target`` under the base path; a version that ends the base and begins the target is there once."""
    return base + _below(base, target)


def _below(base: str, target: str) -> str:
    version = VERSION.search(base)
    if version and re.match(re.escape(version[0]) + r"(?=[/?]|$)", target):
        return target[len(version[0]) :]
    return target
