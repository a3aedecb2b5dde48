"""A TPM 2.0 in software: Debian's ``swtpm`` as a process, spoken to with ``tpm2-tools`` over a Unix socket.

It is nobody's root of trust, since its state are files here; what is real is the protocol, the quote and who
signs it. On each failure: a tool that fails is `HostError` with its last line; swtpm ends with the thread
that started it, killed or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base.errors import HostError
from windtunnel.linux.system import tied_command
from windtunnel.trust.attest.messages import pack
from windtunnel.trust.attest.quote import BOOT, LOADS

KEY = "0x81010002"  # a persistent handle of the owner's
ATTRIBUTES = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|sign"
PATIENCE = 20.0  # seconds until it answers


@dataclass(frozen=True)
class Tpm:
    """Behind the sockets in ``folder``."""

    folder: Path

    @property
    def key(self) -> str:
        """SHA-256 of the attestation key's public half, for allow-lists."""
        return hashlib.sha256((self.folder / "key").read_bytes()).hexdigest()

    def extend(self, pcr: int, measured: str) -> None:
        """A PCR becomes H(PCR | measurement); measurement: 64 hex digits."""
        self._tool("pcrextend", f"{pcr}:sha256={measured}")

    def quote(self, nonce: bytes) -> bytes:
        """A key, what it signed (both PCRs with ``nonce``, up to 32 bytes) and the signature, packed."""
        out = "-m", self.folder / "quote", "-s", self.folder / "signature", "-f", "plain"
        self._tool("quote", "-c", KEY, "-l", f"sha256:{BOOT},{LOADS}", "-q", nonce.hex(), *out)
        return pack("quote", *((self.folder / part).read_bytes() for part in ("key", "quote", "signature")))

    def _tool(self, tool: str, *arguments: str | Path) -> None:
        environment = os.environ | {"TPM2TOOLS_TCTI": f"swtpm:path={self.folder / 'tpm'}"}
        ran = subprocess.run([f"tpm2_{tool}", *arguments], env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise HostError(f"tpm2_{tool}: {(ran.stderr.strip() or 'failed').splitlines()[-1]}")


@contextlib.contextmanager
def swtpm(folder: Path) -> Iterator[Tpm]:
    """A new TPM with an attestation key, until the block ends; all of it lies in ``folder``. Raises
    HostError: swtpm or tpm2-tools are not installed, or do not work."""
    if lack := [name for name in ("swtpm", "tpm2_quote") if shutil.which(name) is None]:
        raise HostError(f"{lack[0]} is not installed; on Debian it is in the packages swtpm and tpm2-tools")
    folder.mkdir()
    sockets = folder / "tpm", folder / "tpm.ctrl"  # tpm2-tools expects the second under that name
    server, control = (f"type=unixio,path={path}" for path in sockets)
    process = subprocess.Popen(tied_command([
        "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={folder}", "--server", server, "--ctrl", control,
        "--flags", "not-need-init,startup-clear", "--log", f"file={folder / 'log'}",
    ]))  # fmt: skip
    try:
        _answers(process, sockets[1])
        tpm, context = Tpm(folder), folder / "context"
        key = "-G", "ecc256:ecdsa-sha256:null", "-a", ATTRIBUTES, "-f", "der", "-o", folder / "key"
        tpm._tool("createprimary", "-C", "e", "-g", "sha256", *key, "-c", context)
        tpm._tool("evictcontrol", "-c", context, KEY)
        tpm._tool("flushcontext", "-t")
        yield tpm
    finally:
        process.kill()
        process.wait()


def _answers(process: subprocess.Popen[bytes], path: Path) -> None:
    last = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < last:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            return
        time.sleep(0.01)
    raise HostError(f"swtpm does not answer at {path}")
