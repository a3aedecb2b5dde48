"""Installs CRIU where the distribution's own is missing or too old, without changing the system's.

``source`` builds Debian's own source tarball against the machine's libraries (a minute of computing): the
program starts fastest. ``packages`` unpacks a newer Debian's packages with all their libraries into one
folder and starts CRIU through that folder's own loader: it needs no compiler. Either way the new program has
to dump and restore a process before it takes its place; until then, and when it fails, whatever was there
stays.

No host is named here: the mirror is the one of the machine's apt sources. Its index of sources is trusted
when its Release file carries a signature that gpgv accepts with Debian's archive keys; the source is trusted
when it has the hash that the index gives.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.live.criu.find import default_prefix, trial, version_of
from windtunnel.agents.sandbox.live.criu.run import Criu
from windtunnel.base.errors import HostError, UserError

Method = Literal["auto", "source", "packages"]
Progress = Callable[[str], None]

AT_LEAST = (4, 2, 1)
BUILD = (
    "build-essential", "pkg-config", "libprotobuf-dev", "libprotobuf-c-dev", "protobuf-c-compiler",
    "protobuf-compiler", "python3-protobuf", "libnl-3-dev", "libcap-dev", "libnet1-dev", "uuid-dev",
    "libbsd-dev",
)  # fmt: skip
SUITE = "sid"
NOT_NEEDED = re.compile(
    r"^(python3|libpython3|debconf|perl|dpkg|tar|coreutils|media-types|openssl|ca-certificates|iptables|netbase|"
    r"readline-common|bash|base-)"
)
COMMAND_SECONDS = 1800
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


def setup(
    prefix: Path | None = None, method: Method = "auto", progress: Progress = lambda line: None
) -> Criu:
    """Install CRIU as ``prefix/bin/criu``; nothing happens when a good one is there already."""
    if method not in ("auto", "source", "packages"):
        raise UserError(f"sandbox setup: method {method!r} is not accepted; use auto, source or packages")
    prefix = (prefix or default_prefix()).absolute()
    try:
        (prefix / "bin").mkdir(parents=True, exist_ok=True)
        lock = open(prefix / ".lock", "w")  # noqa: SIM115 (held below)
    except OSError as failed:
        raise UserError(f"sandbox setup: {prefix} cannot be written ({failed.strerror})") from failed
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for half in (*prefix.glob(".work-*"), prefix / "bin" / "criu.new"):
            _remove(half)
        there = _good(prefix / "bin" / "criu")
        if there is not None:
            progress(f"CRIU {_words(there.version)} is at {there.path} and works")
            return there
        return _install(prefix, method, progress)


def _install(prefix: Path, method: Method, progress: Progress) -> Criu:
    work = Path(tempfile.mkdtemp(prefix=".work-", dir=prefix))
    new = prefix / "bin" / "criu.new"
    tree: Path | None = None
    installed = False
    try:
        missing = missing_packages() if method != "packages" else ()
        if method == "auto":
            method = "source" if not missing or _may_install() else "packages"
        progress(f"CRIU from {'its source' if method == 'source' else 'packages'}")
        if method == "source":
            if missing:
                install_packages(missing, progress)
            shutil.copy2(build(work, progress), new)
        else:
            tree = unpack(work, prefix, progress)
            new.write_text(launcher(tree))
            new.chmod(0o755)
        version = version_of(new)
        if version < AT_LEAST:
            raise CriuError(f"the new CRIU says version {_words(version)}, {_words(AT_LEAST)} is needed")
        criu = Criu(new, version)
        if os.geteuid() == 0:
            progress("dump and restore of a process with it")
            if said := trial(criu):
                raise CriuError(f"CRIU {_words(version)} was made, but does not work here: {said}")
        else:
            progress("not tried: CRIU needs root (or CAP_CHECKPOINT_RESTORE and CAP_SYS_ADMIN) to run")
        new.replace(prefix / "bin" / "criu")
        installed = True
    except ArchiveError as failed:
        raise CriuError(f"sandbox setup: {failed}") from failed
    finally:
        _remove(work)
        _remove(new)
        if tree is not None and not installed:
            _remove(tree)
    for old in prefix.glob("tree-*"):
        if old != tree:
            _remove(old)
    progress(f"CRIU {_words(version)} is at {prefix / 'bin' / 'criu'}")
    return Criu(prefix / "bin" / "criu", version)


def build(work: Path, progress: Progress) -> Path:
    """The program, built from Debian's source tarball in ``work``."""
    source = find_source(fetch_url)
    progress(f"source of CRIU {source.version} ({source.checked})")
    packed = work / source.url.rpartition("/")[2]
    packed.write_bytes(download(source, fetch_url))
    with tarfile.open(packed) as tar:
        tar.extractall(work / "source", filter="data")
    (folder,) = (work / "source").iterdir()
    progress("building, about a minute of computing")
    _command(["make", "-C", str(folder), f"-j{os.cpu_count() or 1}", "criu"])
    program = folder / "criu" / "criu"
    _command(["strip", str(program)])
    return program


def find_source(fetch: Fetch) -> Source:
    """CRIU's newest source on the first mirror that has one that is new enough."""
    reasons = []
    for mirror in mirrors():
        try:
            return newest(mirror, "criu", AT_LEAST, fetch)
        except ArchiveError as failed:
            reasons.append(str(failed))
    raise ArchiveError("; ".join(reasons) or f"no Debian mirror in {APT}/sources.list*")


def unpack(work: Path, prefix: Path, progress: Progress) -> Path:
    """The packages of CRIU and of all that it needs, down to the C library, unpacked into one folder.

    What it needs is computed against an empty list of installed packages, so nothing of the machine counts.
    """
    mirror = next(iter(mirrors()), None)
    if mirror is None or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ArchiveError("packages need apt-get, dpkg-deb and a Debian mirror among the apt sources")
    for folder in ("lists/partial", "cache/archives/partial", "parts", "debs"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    (work / "parts" / "criu.sources").write_text(
        f"Types: deb\nURIs: {mirror}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
    )
    options = {
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work / "cache",
        "Dir::State::status": work / "status",
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": work / "parts",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    progress(f"packages of CRIU from {SUITE}")
    _command([*apt, "update"])
    plan = _command([*apt, "install", "--simulate", "--no-install-recommends", "criu"])
    names = [name for name in re.findall(r"^Inst (\S+)", plan, re.MULTILINE) if not NOT_NEEDED.match(name)]
    _command([*apt, "download", *names], folder=work / "debs")
    tree = Path(tempfile.mkdtemp(prefix="tree-", dir=prefix))
    tree.chmod(0o755)
    for package in sorted((work / "debs").glob("*.deb")):
        _command(["dpkg-deb", "-x", str(package), str(tree)])
    return tree


def launcher(tree: Path) -> str:
    """A line of shell that starts the CRIU of ``tree`` through that folder's own loader and libraries."""
    loader = next(iter(sorted(tree.glob("usr/lib*/**/ld-linux*.so.*"))), None)
    library = next(iter(sorted(tree.glob("usr/lib/*/libc.so.6"))), None)
    program = next(iter(sorted(tree.glob("usr/sbin/criu"))), None)
    if loader is None or library is None or program is None:
        raise ArchiveError("the packages of CRIU do not hold a loader, a C library and the program")
    return f'#!/bin/sh\nexec {loader} --library-path {library.parent} {program} "$@"\n'


def missing_packages(wanted: Sequence[str] = BUILD) -> tuple[str, ...]:
    """Those of ``wanted`` that dpkg does not list as installed; all where there is no dpkg."""
    query = shutil.which("dpkg-query")
    if query is None:
        return tuple(wanted)
    command = [query, "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    installed = {line.split()[0] for line in said.splitlines() if line.endswith(" installed")}
    return tuple(name for name in wanted if name not in installed)


def install_packages(missing: Sequence[str], progress: Progress) -> None:
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    if not _may_install():
        raise CriuError(f"sandbox setup: building CRIU needs packages; as root: {' '.join(command)}")
    progress(f"installing {' '.join(missing)}")
    try:
        _command(command)
    except CriuError:
        _command(["apt-get", "update", "-qq"])
        _command(command)


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _good(program: Path) -> Criu | None:
    version = version_of(program) if program.exists() else ()
    if version < AT_LEAST:
        return None
    criu = Criu(program, version)
    return criu if os.geteuid() != 0 or not trial(criu) else None


def _command(command: list[str], folder: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise CriuError(f"sandbox setup: {command[0]} did not run ({failed})") from failed
    if done.returncode != 0:
        said = (done.stderr or done.stdout)[-4000:]
        raise CriuError(f"sandbox setup: {command[0]} ended with status {done.returncode}", said)
    return done.stdout


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _words(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version) or "unknown"


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
