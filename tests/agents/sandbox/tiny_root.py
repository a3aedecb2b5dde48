"""A small root with a shell, a few tools and most of Python, of this machine, which everybody can read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = (
    "bash", "cat", "chmod", "chown", "dash", "dd", "env", "grep", "head", "hostname", "id", "ln", "ls",
    "mkdir", "mkfifo", "mknod", "mount", "mv", "nohup", "rm", "rmdir", "seq", "setsid", "sleep", "stat",
    "touch", "true", "truncate", "umount", "unshare", "wc", "yes",
)  # fmt: skip
PACKAGES = (
    "collections", "ctypes", "email", "encodings", "html", "http", "importlib", "json", "re", "urllib",
)  # fmt: skip
LARGE = (
    "_bz2",
    "_codecs",
    "_curses",
    "_dbm",
    "_decimal",
    "_gdbm",
    "_hashlib",
    "_lzma",
    "_sqlite3",
    "_ssl",
    "_test",
)
"""Modules that need large libraries, or are large."""
FOLDERS = ["usr/bin", "usr/lib", "usr/lib64", "etc", "tmp", "root", "workspace", "proc", "dev", "var", "mnt"]


def make(root: Path) -> Path:
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "tmp",
        "root",
        "workspace",
        "proc",
        "dev",
        "var",
        "mnt",
    ):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "usr/bin/sh").symlink_to("dash")
    library = Path("/usr/lib") / Path(os.path.realpath("/usr/bin/python3")).name
    programs = [shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in (*TOOLS, "python3")]
    if None in programs:
        pytest.skip(f"needs {TOOLS[programs.index(None)]}")
    modules = (library / "lib-dynload").glob("*.so")
    files = [*map(str, programs), *(str(each) for each in modules if not each.name.startswith(LARGE))]
    needed = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout.split()
    libraries = {word for word in needed if word.startswith("/") and not word.endswith(":")}
    for file in (*files, *libraries, *map(str, library.glob("*.py"))):
        target = root / ("usr" + file.removeprefix("/usr"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(file), target)
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(library / package, root / library.relative_to("/") / package, ignore=ignore)
    return root
