"""The secret that the processes of a job share, and where it lies; and the certificates of its TLS.

It comes from a file (`--secret-file`) or the environment variable `VARIABLE`, or is made; it is kept in a
file that only its owner may read, and travels between processes as the name of that file. It is on no
command line and in no log.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.tls import Certificates

VARIABLE = "WINDTUNNEL_SECRET"
NAME = "secret"
SHORTEST, LONGEST = 16, 4096


@dataclass(frozen=True)
class Keys:
    """``secret``: not shown where this is printed. ``tls``: None for connections that are not encrypted."""

    secret: bytes = field(repr=False)
    tls: Certificates | None = None

    @staticmethod
    def new() -> Keys:
        """A new secret of 256 bits."""
        return Keys(secrets.token_hex(32).encode())

    @staticmethod
    def from_option(path: Path | None, option: str = "--secret-file") -> Keys | None:
        """The secret in the file ``path``, or that of the environment; None if there is neither.

        Raises:
            UserError: it cannot be read, others may read it, or it is too short.
        """
        if path is not None:
            return Keys.read(path, option)
        if VARIABLE in os.environ:
            return Keys(_checked(os.environ[VARIABLE].encode(), VARIABLE))
        return None

    @staticmethod
    def of_job(secret: str, tls: Sequence[str]) -> Keys:
        """Those that another process of the job names: the file of the secret, and those of `tls.OPTIONS`
        (or none).

        Raises:
            UserError: see `read` and `Certificates.load`.
        """
        return replace(
            Keys.read(Path(secret), "the job's secret"), tls=Certificates.load(tls) if tls else None
        )

    @property
    def files(self) -> tuple[str, ...]:
        """For `of_job`: the names of the certificates' files."""
        return self.tls.paths if self.tls else ()

    @staticmethod
    def read(path: Path, option: str = "--secret-file") -> Keys:
        """The secret in the file ``path``.

        Raises:
            UserError: it cannot be read, others may read it, or it is too short.
        """
        where = f"{option} {path}"
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                content = file.read(LONGEST + 1)
        except OSError as error:
            raise UserError(f"{where}: the secret cannot be read ({error.strerror})") from error
        if mode & 0o077:
            raise UserError(f"{where}: others may read or write it (mode {mode:04o}); accepted is mode 0600")
        return Keys(_checked(content, where))

    def write(self, path: Path) -> None:
        """Keep it in ``path``, which only the owner may read."""
        atomic.replace(path, self.secret + b"\n", mode=0o600)


def of_run(folder: Path, path: Path | None) -> Keys:
    """The secret of the run in ``folder``: what is given, else the run's own, else a new one; kept there.

    Raises:
        UserError: see `Keys.from_option`.
    """
    secret_file = folder / NAME
    keys = Keys.from_option(path) or (
        Keys.read(secret_file, "the run's secret") if secret_file.exists() else Keys.new()
    )
    keys.write(secret_file)
    return keys


def _checked(content: bytes, where: str) -> bytes:
    secret = content.strip()
    if not SHORTEST <= len(secret) <= LONGEST:
        raise UserError(
            f"{where}: a secret of {len(secret)} bytes; accepted are {SHORTEST} to {LONGEST}, best at random"
        )
    return secret
