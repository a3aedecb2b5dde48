"""Where a daemon answers: a home folder (its Unix socket) or a URL with a token."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.live.place import default_home
from windtunnel.base.errors import UserError

SOCKET = "daemon.sock"
LONGEST = 107
"""Bytes that the kernel accepts as the path of a Unix socket."""


@dataclass(frozen=True)
class Address:
    """``home``: the folder whose daemon is meant; None for one that is reached over HTTP at ``url``."""

    home: Path | None
    url: str
    token: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def socket_of(home: Path) -> Path:
    """The Unix socket of a home; UserError where its path is too long for the kernel."""
    path = home / SOCKET
    if len(os.fsencode(path)) > LONGEST:
        raise UserError(
            f"sandbox: home {home} is too long: the path of its socket has {len(os.fsencode(path))} bytes, "
            f"at most {LONGEST} are possible"
        )
    return path


def address(where: str | os.PathLike[str] | None, token: str | None = None) -> Address:
    """What ``where`` means: None is ``$WINDTUNNEL_SANDBOX_URL`` or else the default home.

    The token comes from the argument or ``$WINDTUNNEL_SANDBOX_TOKEN``.
    """
    if where is None:
        where = os.environ.get("WINDTUNNEL_SANDBOX_URL") or default_home()
    if isinstance(where, str) and "://" in where:
        scheme = where.split("://", 1)[0]
        if scheme not in ("http", "https"):
            raise UserError(
                f"sandbox: URL {where!r} has scheme {scheme!r}; use http://HOST:PORT or https://…"
            )
        given = token or os.environ.get("WINDTUNNEL_SANDBOX_TOKEN", "")
        if not given:
            raise UserError(f"sandbox: {where} needs a token; set WINDTUNNEL_SANDBOX_TOKEN or give one")
        return Address(None, where.rstrip("/"), given)
    return Address(Path(where).absolute(), "http://sandbox")
