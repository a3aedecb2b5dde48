"""Certificates for tests, made with the ``openssl`` command: of one CA and of others, also expired."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from windtunnel.base.tls import Certificates

_EXPIRED = """
[ca]
default_ca = past
[past]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
[any]
commonName = supplied
"""


@dataclass(frozen=True)
class Issued:
    """Files of one holder: certificate, key, CA."""

    cert: Path
    key: Path
    ca: Path

    @property
    def paths(self) -> tuple[str, str, str]:
        return str(self.cert), str(self.key), str(self.ca)

    @property
    def options(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]

    def load(self) -> Certificates:
        return Certificates.load(self.paths)

    def cert_as_key(self, folder: Path) -> Path:
        """What is no key."""
        path = folder / "no.key"
        path.write_bytes(self.cert.read_bytes())
        path.chmod(0o600)
        return path

    def locked(self, folder: Path) -> Path:
        """The key, behind a password."""
        path = folder / "locked.key"
        _openssl(folder, f"ec -in {self.key} -aes128 -passout pass:something -out {path}")
        path.chmod(0o600)
        return path


class Authority:
    """A CA in ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.ca = folder / "ca.pem"
        _openssl(folder, f"req -x509 -days 2 -subj /CN={folder.name} {_KEY} -keyout ca.key -out ca.pem")

    def issue(self, name: str, address: str = "127.0.0.1") -> Issued:
        """A host's certificate."""
        self._request(name)
        (self._folder / "names").write_text(f"subjectAltName=IP:{address}\n")
        _openssl(self._folder, f"x509 -req -days 2 -in {name}.csr {_SIGN} -extfile names -out {name}.pem")
        return self._issued(name)

    def expired(self, name: str) -> Issued:
        """One that was valid in the year 2020."""
        self._request(name)
        for file, text in (("past.cnf", _EXPIRED), ("index", ""), ("serial", "01\n")):
            (self._folder / file).write_text(text)
        dates = "-startdate 20200101000000Z -enddate 20210101000000Z"
        _openssl(
            self._folder,
            f"ca -batch -notext -config past.cnf {dates} -cert ca.pem -keyfile ca.key -in {name}.csr"
            f" -out {name}.pem",
        )
        return self._issued(name)

    def _request(self, name: str) -> None:
        _openssl(self._folder, f"req -subj /CN={name} {_KEY} -keyout {name}.key -out {name}.csr")
        (self._folder / f"{name}.key").chmod(0o600)

    def _issued(self, name: str) -> Issued:
        return Issued(self._folder / f"{name}.pem", self._folder / f"{name}.key", self.ca)


_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
_SIGN = "-CA ca.pem -CAkey ca.key -CAcreateserial"


def _openssl(folder: Path, words: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed, which makes the certificates")
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
