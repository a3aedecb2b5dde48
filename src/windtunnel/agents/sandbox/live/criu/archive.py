"""Debian's archive, as far as fetching one source package needs it: the machine's own mirror, its index, its
signature.

No host is named here: the mirror is the one of the machine's apt sources. The index of sources is trusted
when its Release file carries a signature that gpgv accepts with Debian's archive keys; the package is trusted
when it has the hash that the index gives.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base.errors import HostError

APT = Path("/etc/apt")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITES = ("sid", "testing", "stable")
SECONDS = 60

Fetch = Callable[[str], bytes]


class ArchiveError(HostError):
    """The archive could not be read, or what it gave is not what it promised."""


@dataclass(frozen=True)
class Source:
    """One source tarball. ``sha256`` is empty when no index vouches for it; ``checked`` says who does."""

    url: str
    version: str
    sha256: str
    checked: str


def mirrors(apt: Path = APT) -> list[str]:
    """The Debian mirrors of the apt sources, in both their formats, in order."""
    found: dict[str, None] = {}
    for file in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", _text(file)):
            fields = dict(re.findall(r"^(\S+):[ \t]*(.*)$", stanza, re.MULTILINE))
            if (
                fields.get("Enabled", "yes").lower() != "no"
                and "main" in fields.get("Components", "").split()
            ):
                found.update(dict.fromkeys(uri.rstrip("/") for uri in fields.get("URIs", "").split()))
    for file in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))):
        for line in _text(file).splitlines():
            match = re.match(r"deb(?:-src)?\s+(?:\[[^\]]*\]\s+)?(\S+)\s+\S+\s+(.*)$", line.strip())
            if match and "main" in match[2].split():
                found[match[1].rstrip("/")] = None
    usable = [uri for uri in found if uri.startswith(("http://", "https://"))]
    return [uri for uri in usable if uri.endswith("/debian")] + [
        uri for uri in usable if not uri.endswith(("/debian", "-security", "security"))
    ]


def newest(mirror: str, package: str, at_least: tuple[int, ...], fetch: Fetch) -> Source:
    """The newest version of ``package`` among the suites, or, where no index can be read, of the pool."""
    reasons = []
    for suite in SUITES:
        try:
            source = from_index(mirror, suite, package, fetch)
        except ArchiveError as failed:
            reasons.append(f"{suite}: {failed}")
            continue
        if numbers(source.version) >= at_least:
            return source
        reasons.append(f"{suite}: only {source.version}")
    source = from_pool(mirror, package, fetch)
    if numbers(source.version) < at_least:
        raise ArchiveError(f"no {package} of at least {'.'.join(map(str, at_least))} ({'; '.join(reasons)})")
    return source


def from_index(mirror: str, suite: str, package: str, fetch: Fetch) -> Source:
    """The package's tarball by the index of ``suite``."""
    release, checked = verified(fetch(f"{mirror}/dists/{suite}/InRelease"))
    name = "main/source/Sources.xz"
    match = re.search(rf"^ ([0-9a-f]{{64}})\s+\d+ {re.escape(name)}$", release, re.MULTILINE)
    if match is None:
        raise ArchiveError("its Release file names no index of sources")
    packed = fetch(f"{mirror}/dists/{suite}/{name}")
    if hashlib.sha256(packed).hexdigest() != match[1]:
        raise ArchiveError("its index of sources does not have the hash that its Release file gives")
    index = lzma.decompress(packed).decode(errors="replace")
    found = []
    for stanza in re.findall(
        rf"^Package: {re.escape(package)}\n.*?(?=\n\n|\Z)", index, re.MULTILINE | re.DOTALL
    ):
        version = re.search(r"^Version: (\S+)$", stanza, re.MULTILINE)
        folder = re.search(r"^Directory: (\S+)$", stanza, re.MULTILINE)
        hashes = stanza.partition("Checksums-Sha256:")[2]
        tarball = re.search(r"^ ([0-9a-f]{64}) \d+ (\S+\.orig\.tar\.(?:gz|xz|bz2))$", hashes, re.MULTILINE)
        if version and folder and tarball:
            found.append(Source(f"{mirror}/{folder[1]}/{tarball[2]}", version[1], tarball[1], checked))
    if not found:
        raise ArchiveError(f"no {package} in its index of sources")
    return max(found, key=lambda source: numbers(source.version))


def from_pool(mirror: str, package: str, fetch: Fetch) -> Source:
    """The newest tarball that the mirror's folder of the package lists; nobody vouches for it."""
    folder = f"{mirror}/pool/main/{package[0]}/{package}/"
    listing = fetch(folder).decode(errors="replace")
    pattern = rf"{re.escape(package)}_([0-9][^_\"<>/]*)\.orig\.tar\.(gz|xz|bz2)(?=[\"<])"
    found = {(match[1], match[0]) for match in re.finditer(pattern, listing)}
    if not found:
        raise ArchiveError(f"no source of {package} in the mirror's pool")
    version, name = max(found, key=lambda pair: numbers(pair[0]))
    return Source(folder + name, version, "", "unverified: no index of the archive could be read")


def verified(release: bytes) -> tuple[str, str]:
    """The signed text of an InRelease file, and in words whether its signature was checked."""
    gpgv = shutil.which("gpgv")
    if gpgv is None or not KEYRING.exists():
        lacking = "gpgv" if gpgv is None else "debian-archive-keyring"
        return release.decode(errors="replace"), f"signature unverified: {lacking} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        signed, text = Path(folder, "InRelease"), Path(folder, "Release")
        signed.write_bytes(release)
        command = [gpgv, "--keyring", str(KEYRING), "--status-fd", "1", "--output", str(text), str(signed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        # one good signature suffices: a newer key that this machine does not know yet may have signed too
        if "VALIDSIG" not in done.stdout or "BADSIG" in done.stdout or not text.exists():
            raise ArchiveError("its Release file carries no signature of Debian's archive keys")
        return text.read_text(errors="replace"), "signature of Debian's archive checked"


def download(source: Source, fetch: Fetch) -> bytes:
    content = fetch(source.url)
    if source.sha256 and hashlib.sha256(content).hexdigest() != source.sha256:
        raise ArchiveError(f"{source.url.rpartition('/')[2]} does not have the hash that the index gives")
    return content


def fetch_url(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError, ValueError) as failed:
        raise ArchiveError(f"{url.rpartition('/')[2] or url} cannot be fetched ({failed})") from failed


def numbers(version: str) -> tuple[int, ...]:
    """(4, 2, 1) for ``4.2.1-3``."""
    upstream = version.partition(":")[2] or version
    match = re.match(r"\d+(?:\.\d+)*", upstream)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _text(file: Path) -> str:
    try:
        return "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    except OSError:
        return ""
