"""The CRIU program: where it is, whether it works here, and how it is built.

Working means a dump and a restore of one tiny process, and nothing less: ``criu check`` says what the kernel
offers, not whether this program can use it; a CRIU that is too old for the kernel passes it and fails at the
first dump. It is built from one source that is known by its digest, with this package's patches, beside the
system's; a new one has to work before it takes its place, and until then what was there stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path

from windtunnel.agents.sandbox.criu import COMMON, Criu, kernel_cache, read_log
from windtunnel.agents.sandbox.criu.failure import real_errors
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.base import paths
from windtunnel.base.errors import UserError
from windtunnel.linux.processes import command_line
from windtunnel.linux.system import in_sbin, locked

Progress = Callable[[str], None]

TARBALL = "criu_4.2.1.orig.tar.xz"
SHA256 = "29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9"
SNAPSHOT = "https://snapshot.debian.org/file/943aa42a53e9678fee0c8cb85c544afa2d331229"
"""Where the tarball stays, by its SHA-1, when mirrors have a newer one."""
PATCHES = tuple(sorted((Path(__file__).parent / "patches").glob("*.patch")))
BUILD = (
    "build-essential", "patch", "pkg-config", "libprotobuf-dev", "libprotobuf-c-dev", "protobuf-c-compiler",
    "protobuf-compiler", "python3-protobuf", "libnl-3-dev", "libcap-dev", "libnet1-dev", "uuid-dev",
    "libbsd-dev",
)  # fmt: skip
COMMAND_SECONDS, FETCH_SECONDS, TRIAL_SECONDS = 1800, 60, 30
TRIES = 3
"""How often a trial is made: the restored process wants its old number back, which another may have got."""


def default_prefix() -> Path:
    """The folder into which ``setup`` installs: of the machine for root, else of the user."""
    return paths.of_host() / "criu"


def find_criu() -> Criu | None:
    """The CRIU to use: ``$WINDTUNNEL_CRIU``, the own folder, PATH; None when there is none."""
    path = os.environ.get("WINDTUNNEL_CRIU")
    system = in_sbin("criu") if not path and os.geteuid() == 0 else shutil.which("criu")
    for candidate in (path, str(default_prefix() / "bin" / "criu"), system):
        if candidate and os.access(candidate, os.X_OK) and (criu := read_program(Path(candidate))):
            return criu
    return None


def read_program(program: Path) -> Criu | None:
    """The CRIU at ``program``, by what it says of itself; None when that is no CRIU."""
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Version: *v?(\d+(?:\.\d+)*)", output)
    if match is None:
        return None
    version = tuple(int(part) for part in match.group(1).split("."))
    return Criu(program, version, patched=f"GitID: {build_id()}" in output)


@cache
def build_id() -> str:
    """What a CRIU of the known source with the patches of this package says as its ``GitID``."""
    digest = hashlib.sha256(SHA256.encode())
    for patch in PATCHES:
        digest.update(patch.read_bytes())
    return f"windtunnel-{digest.hexdigest()[:12]}"


def trial(criu: Criu) -> str:
    """Why ``criu`` does not work on this machine, in words; empty when it does."""
    if os.geteuid() != 0:
        return "it needs root (or CAP_CHECKPOINT_RESTORE and CAP_SYS_ADMIN) to dump and restore"
    half = (kernel_cache() or Path("/run")) / "criu.kdat.tmp"
    with contextlib.suppress(OSError):
        # a CRIU that was killed while it wrote its cache keeps all later ones from writing it
        if time.time() - half.stat().st_mtime > 5:
            half.unlink()
    reason = ""
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="windtunnel-trial-") as folder:
            reason = _dump_and_restore(criu.path, Path(folder))
        if not reason:
            break
    return reason


def _dump_and_restore(program: Path, folder: Path) -> str:
    """What failed, in words; empty when a process was dumped and restored."""
    silent = subprocess.DEVNULL
    child = subprocess.Popen(
        ["sleep", "1000"], stdin=silent, stdout=silent, stderr=silent, cwd="/", start_new_session=True
    )

    def failed(*words: str) -> str:
        command = [str(program), *words, "-D", str(folder), *COMMON]
        try:
            done = subprocess.run(command, stdout=silent, stderr=silent, timeout=TRIAL_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        log = read_log(folder)
        return f"CRIU failed: {(real_errors(log) or [log.strip()])[0]}" if done.returncode else ""

    try:
        reason = failed("dump", "-t", str(child.pid))
    finally:
        child.kill()
        child.wait()
    if reason := reason or failed("restore", "-d"):
        return reason
    try:
        right = command_line(child.pid) == "sleep 1000"
        return "" if right else "the restored process is not the one that was dumped"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


def setup(progress: Progress = lambda line: None) -> Criu:
    """Install CRIU in `default_prefix`; nothing happens when this very build is there and works.

    Raises CriuError where it cannot be built or does not work, UserError where that is not writable.
    """
    prefix = default_prefix()
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
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=FETCH_SECONDS) as answer:
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
