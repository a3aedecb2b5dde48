"""Builds CRIU where the distribution's own is missing or too old, without changing the system's.

The source is Debian's tarball of one version, known by its digest, from the mirror of the machine's apt
sources; where that has it no more, apt fetches the newest and checks its signature. The new program has to
dump and restore a process before it takes its place; until then, and when it fails, what was there stays.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from windtunnel.agents.sandbox.criu.find import default_prefix, trial, version_of
from windtunnel.agents.sandbox.criu.run import Criu
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.base.errors import UserError
from windtunnel.linux.system import locked

Progress = Callable[[str], None]

AT_LEAST = (4, 2, 1)
TARBALL = "criu_4.2.1.orig.tar.xz"
SHA256 = "29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9"
SUITE = "sid"
"""Where apt looks for a newer one."""
BUILD = (
    "build-essential", "pkg-config", "libprotobuf-dev", "libprotobuf-c-dev", "protobuf-c-compiler",
    "protobuf-compiler", "python3-protobuf", "libnl-3-dev", "libcap-dev", "libnet1-dev", "uuid-dev",
    "libbsd-dev",
)  # fmt: skip
COMMAND_SECONDS, FETCH_SECONDS = 1800, 60


def setup(prefix: Path | None = None, progress: Progress = lambda line: None) -> Criu:
    """Install CRIU as ``prefix/bin/criu``; nothing happens when a good one is there already."""
    prefix = (prefix or default_prefix()).absolute()
    program = prefix / "bin" / "criu"
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        with locked(prefix / ".lock"):
            if (version := version_of(program)) >= AT_LEAST and not _fails(Criu(program, version)):
                progress(f"CRIU {_words(version)} is at {program} and works")
                return Criu(program, version)
            for half in prefix.glob(".work-*"):
                shutil.rmtree(half, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".work-", dir=prefix) as work:
                return _install(Path(work), program, progress)
    except OSError as failed:
        raise UserError(f"sandbox setup: {prefix} cannot be written ({failed})") from failed


def _install(work: Path, program: Path, progress: Progress) -> Criu:
    if os.geteuid() == 0 and shutil.which("apt-get"):
        _packages(progress)
    try:
        new = build(work, progress)
    except CriuError as failed:
        raise CriuError(f"{failed}; building it needs {' '.join(BUILD)}", failed.details) from failed
    version = version_of(new)
    if version < AT_LEAST:
        raise CriuError(f"the new CRIU says version {_words(version)}, {_words(AT_LEAST)} is needed")
    if said := _fails(Criu(new, version)):
        raise CriuError(f"CRIU {_words(version)} was built, but does not work here: {said}")
    new.replace(program)
    progress(f"CRIU {_words(version)} is at {program}" + " (not tried: that needs root)" * bool(os.geteuid()))
    return Criu(program, version)


def build(work: Path, progress: Progress) -> Path:
    """The program, built in ``work``."""
    packed = source(work, progress)
    with tarfile.open(packed) as tar:
        tar.extractall(work / "source", filter="data")
    (folder,) = (work / "source").iterdir()
    progress(f"building {folder.name}, about a minute of computing")
    _command(["make", "-C", str(folder), f"-j{os.cpu_count() or 1}", "criu"])
    _command(["strip", str(folder / "criu" / "criu")])
    return folder / "criu" / "criu"


def source(work: Path, progress: Progress) -> Path:
    """The tarball, in ``work``."""
    for mirror in mirrors():
        with (
            suppress(OSError),
            urllib.request.urlopen(f"{mirror}pool/main/c/criu/{TARBALL}", timeout=FETCH_SECONDS) as answer,
        ):
            content = answer.read()
            if hashlib.sha256(content).hexdigest() == SHA256:
                (work / TARBALL).write_bytes(content)
                return work / TARBALL
            progress(f"{mirror} has another {TARBALL} than the one that is known: it is not used")
    return newest(work, progress)


def newest(work: Path, progress: Progress) -> Path:
    """What `SUITE` has, by an apt whose lists are its own, so that nothing of the machine counts."""
    mirror = next(iter(mirrors()), None)
    if mirror is None:
        raise CriuError(
            f"its source is on no mirror of Debian among the apt sources; install CRIU {_words(AT_LEAST)} or "
            "newer, and name it in WINDTUNNEL_CRIU"
        )
    progress(f"{TARBALL} is not on the mirror any more; asking apt for that of {SUITE}")
    for folder in ("lists/partial", "cache/archives/partial", "parts"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    (work / "parts" / "criu.sources").write_text(
        f"Types: deb-src\nURIs: {mirror}\nSuites: {SUITE}\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )
    places = {
        "Dir::State::lists": work / "lists", "Dir::Cache": work / "cache",
        "Dir::State::status": work / "status", "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": work / "parts", "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for name, value in places.items() for word in ("-o", f"{name}={value}"))]
    _command([*apt, "update"])
    _command([*apt, "source", "--download-only", "--tar-only", "criu"], folder=work)
    return next(file for file in work.glob("criu_*.orig.tar.*") if file.suffix != ".asc")


def mirrors() -> list[str]:
    """The mirrors of Debian among the apt sources."""
    if shutil.which("apt-get") is None:
        return []
    listed = _command(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
    return [uri for uri in dict.fromkeys(listed.split()) if uri.endswith("/debian/")]


def _packages(progress: Progress) -> None:
    """What building needs; apt does nothing where all is there."""
    progress(f"packages that building needs: {' '.join(BUILD)}")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *BUILD]
    try:
        _command(command)
    except CriuError:
        _command(["apt-get", "update", "-qq"])
        _command(command)


def _fails(criu: Criu) -> str:
    """Why it does not work here; without root it cannot be tried."""
    return trial(criu) if os.geteuid() == 0 else ""


def _command(command: list[str], folder: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=COMMAND_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise CriuError(f"{command[0]} did not run ({failed})") from failed
    if done.returncode != 0:
        said = (done.stderr or done.stdout)[-4000:]
        raise CriuError(f"{command[0]} ended with status {done.returncode}", said)
    return done.stdout


def _words(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version) or "unknown"
