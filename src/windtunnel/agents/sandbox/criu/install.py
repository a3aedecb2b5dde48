"""Builds CRIU from one source that is known by its digest, with this package's patches, beside the system's.

The new program has to dump and restore a process before it takes its place; until then, and when it fails,
what was there stays.
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

from windtunnel.agents.sandbox.criu.find import PATCHES, SHA256, build_id, default_prefix, read_program, trial
from windtunnel.agents.sandbox.criu.run import Criu
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.base.errors import UserError
from windtunnel.linux.system import locked

Progress = Callable[[str], None]

TARBALL = "criu_4.2.1.orig.tar.xz"
SNAPSHOT = "https://snapshot.debian.org/file/943aa42a53e9678fee0c8cb85c544afa2d331229"
"""Where the tarball stays, by its SHA-1, when mirrors have a newer one."""
BUILD = (
    "build-essential", "patch", "pkg-config", "libprotobuf-dev", "libprotobuf-c-dev", "protobuf-c-compiler",
    "protobuf-compiler", "python3-protobuf", "libnl-3-dev", "libcap-dev", "libnet1-dev", "uuid-dev",
    "libbsd-dev",
)  # fmt: skip
COMMAND_SECONDS, FETCH_SECONDS = 1800, 60


def setup(prefix: Path | None = None, progress: Progress = lambda line: None) -> Criu:
    """Install CRIU as ``prefix/bin/criu``; nothing happens when this very build is there and works.

    Raises CriuError where it cannot be built or does not work, UserError where ``prefix`` is not writable.
    """
    prefix = (prefix or default_prefix()).absolute()
    program = prefix / "bin" / "criu"
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        with locked(prefix / ".lock"):
            present = read_program(program)
            if present is not None and present.patched and not _fault(present):
                progress(f"CRIU {present.words} is at {program} and works")
                return present
            for half in prefix.glob(".work-*"):
                shutil.rmtree(half, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".work-", dir=prefix) as work:
                return _install(Path(work), program, progress)
    except OSError as failed:
        raise UserError(f"sandbox setup: {prefix} cannot be written ({failed})") from failed


def _install(work: Path, program: Path, progress: Progress) -> Criu:
    if os.geteuid() == 0 and shutil.which("apt-get"):
        _install_packages(progress)
    try:
        built = build(work, progress)
    except CriuError as failed:
        raise CriuError(f"{failed}; building it needs {' '.join(BUILD)}", failed.details) from failed
    criu = read_program(built)
    if criu is None or not criu.patched:
        raise CriuError(f"the new CRIU is not build {build_id()}")
    if fault := _fault(criu):
        raise CriuError(f"CRIU {criu.words} was built, but does not work here: {fault}")
    built.replace(program)
    progress(f"CRIU {criu.words} is at {program}" + " (not tried: that needs root)" * bool(os.geteuid()))
    return Criu(program, criu.version, patched=True)


def build(work: Path, progress: Progress) -> Path:
    """The program, built in ``work``."""
    tarball = fetch_source(work, progress)
    with tarfile.open(tarball) as tar:
        tar.extractall(work / "source", filter="data")
    (folder,) = (work / "source").iterdir()
    for patch in PATCHES:
        _run(["patch", "-p1", "-d", str(folder), "-i", str(patch)])
    progress(f"building {folder.name}, about a minute of computing")
    _run(["make", "-C", str(folder), f"-j{os.cpu_count() or 1}", f"GITID={build_id()}", "criu"])
    _run(["strip", str(folder / "criu" / "criu")])
    return folder / "criu" / "criu"


def fetch_source(work: Path, progress: Progress) -> Path:
    """The tarball, in ``work``, from a mirror among the apt sources, or the archive of all of them."""
    for address in (*(f"{mirror}pool/main/c/criu/{TARBALL}" for mirror in list_mirrors()), SNAPSHOT):
        with suppress(OSError), urllib.request.urlopen(address, timeout=FETCH_SECONDS) as answer:
            content = answer.read()
            if hashlib.sha256(content).hexdigest() == SHA256:
                (work / TARBALL).write_bytes(content)
                return work / TARBALL
            progress(f"{address} is another {TARBALL} than the one that is known: it is not used")
    raise CriuError(
        f"{TARBALL} is neither on a mirror of Debian among the apt sources nor at {SNAPSHOT}; build CRIU "
        f"with {', '.join(map(str, PATCHES))}, and name it in WINDTUNNEL_CRIU"
    )


def list_mirrors() -> list[str]:
    """The mirrors of Debian among the apt sources."""
    if shutil.which("apt-get") is None:
        return []
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
    return [uri for uri in dict.fromkeys(listed.split()) if uri.endswith("/debian/")]


def _install_packages(progress: Progress) -> None:
    """What building needs; apt does nothing where all is there."""
    progress(f"packages that building needs: {' '.join(BUILD)}")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *BUILD]
    try:
        _run(command)
    except CriuError:
        _run(["apt-get", "update", "-qq"])
        _run(command)


def _fault(criu: Criu) -> str:
    """Why it does not work here; without root it cannot be tried."""
    return trial(criu) if os.geteuid() == 0 else ""


def _run(command: list[str]) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=COMMAND_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise CriuError(f"{command[0]} did not run ({failed})") from failed
    if done.returncode != 0:
        raise CriuError(
            f"{command[0]} ended with status {done.returncode}", (done.stderr or done.stdout)[-4000:]
        )
    return done.stdout
