"""Installs CRIU where the distribution's own is missing or too old, without changing the system's.

``source`` builds Debian's own source tarball against the machine's libraries (a minute of computing): the
program starts fastest. ``packages`` unpacks a newer Debian's packages with all their libraries into one
folder and starts CRIU through that folder's own loader: it needs no compiler. Either way the new program has
to dump and restore a process before it takes its place; until then, and when it fails, whatever was there
stays.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.live.criu import archive
from windtunnel.agents.sandbox.live.criu.archive import ArchiveError
from windtunnel.agents.sandbox.live.criu.find import default_prefix, trial, version_of
from windtunnel.agents.sandbox.live.criu.run import Criu
from windtunnel.base.errors import UserError

Method = Literal["auto", "source", "packages"]
Progress = Callable[[str], None]

AT_LEAST = (4, 2, 1)
BUILD = (
    "build-essential",
    "pkg-config",
    "libprotobuf-dev",
    "libprotobuf-c-dev",
    "protobuf-c-compiler",
    "protobuf-compiler",
    "python3-protobuf",
    "libnl-3-dev",
    "libcap-dev",
    "libnet1-dev",
    "uuid-dev",
    "libbsd-dev",
)
SUITE = "sid"
NOT_NEEDED = re.compile(
    r"^(python3|libpython3|debconf|perl|dpkg|tar|coreutils|media-types|openssl|ca-certificates|iptables|netbase|"
    r"readline-common|bash|base-)"
)
COMMAND_SECONDS = 1800


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


def build(work: Path, progress: Progress, fetch: archive.Fetch = archive.fetch_url) -> Path:
    """The program, built from Debian's source tarball in ``work``."""
    source = find_source(fetch)
    progress(f"source of CRIU {source.version} ({source.checked})")
    packed = work / source.url.rpartition("/")[2]
    packed.write_bytes(archive.download(source, fetch))
    with tarfile.open(packed) as tar:
        tar.extractall(work / "source", filter="data")
    (folder,) = (work / "source").iterdir()
    progress("building, about a minute of computing")
    _command(["make", "-C", str(folder), f"-j{os.cpu_count() or 1}", "criu"])
    program = folder / "criu" / "criu"
    _command(["strip", str(program)])
    return program


def find_source(fetch: archive.Fetch) -> archive.Source:
    """CRIU's newest source on the first mirror that has one that is new enough."""
    reasons = []
    for mirror in archive.mirrors():
        try:
            return archive.newest(mirror, "criu", AT_LEAST, fetch)
        except ArchiveError as failed:
            reasons.append(str(failed))
    raise ArchiveError("; ".join(reasons) or f"no Debian mirror in {archive.APT}/sources.list*")


def unpack(work: Path, prefix: Path, progress: Progress) -> Path:
    """The packages of CRIU and of all that it needs, down to the C library, unpacked into one folder.

    What it needs is computed against an empty list of installed packages, so nothing of the machine counts.
    """
    mirrors = archive.mirrors()
    if not mirrors or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ArchiveError("packages need apt-get, dpkg-deb and a Debian mirror among the apt sources")
    for folder in ("lists/partial", "cache/archives/partial", "parts", "debs"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    (work / "parts" / "criu.sources").write_text(
        f"Types: deb\nURIs: {mirrors[0]}\nSuites: {SUITE}\nComponents: main\nSigned-By: {archive.KEYRING}\n"
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
