"""What a user asks for, looked at before anything is made: one sentence each, and nothing is left behind.

What the kernel or the shells cannot take (an equals sign in the name of a variable, a line feed in a host
name) would else come out as a fault of the host, in the middle, or not at all.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from windtunnel.agents.sandbox.model import NETWORKS, SandboxSpec
from windtunnel.agents.sandbox.place import checked_name
from windtunnel.agents.sandbox.proxy.egress import parse_allowed
from windtunnel.agents.sandbox.proxy.upstream import split_base
from windtunnel.base.errors import UserError
from windtunnel.linux.system import held, open_inside, opened

HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LONGEST_LABEL = 200
LONGEST_VALUE, MOST_ENVIRONMENT = 128 * 2**10, 2**20
"""Bytes: of one variable with its name (MAX_ARG_STRLEN of execve(2)), and of all of them."""
LEAST: dict[str, tuple[float, str]] = {
    "memory": (16 * 2**20, "bytes of at least 16M, or none"),
    "cpus": (0.01, "at least 0.01, or none"),
    "pids": (3, "at least 3 (init, a shell and a command), or none"),
    "disk": (2**20, "bytes of at least 1M, or none"),
}
SHELLS = ("/bin/bash", "/bin/sh")


def checked_spec(spec: SandboxSpec) -> None:
    """Raises UserError for the first field that cannot be."""
    checked_name(spec.name)
    for field, value, accepted in _wrong(spec):
        text = repr(value)
        excerpt = text if len(text) <= 80 else f"{text[:77]}..."
        raise UserError(f"sandbox {spec.name}: {field} {excerpt} is not accepted; {accepted}")


def _wrong(spec: SandboxSpec) -> Iterator[tuple[str, object, str]]:
    """Each field that cannot be, with its value and what is accepted. Raises UserError for two at odds."""
    if not spec.image.strip() or "\0" in spec.image:
        images = "give 'host', a folder, a tarball, an OCI image layout or 'docker://NAME'"
        yield "image", spec.image, images
    kind, listed, _ = spec.network.partition(":")
    if kind not in NETWORKS or (listed and kind != "egress"):
        yield "network", spec.network, f"use {', '.join(NETWORKS)} or egress:HOST,*.HOST"
    if kind == "egress":
        parse_allowed(spec.network)
    if (spec.network == "proxy") != bool(spec.proxy_upstream):
        raise UserError(
            f"sandbox {spec.name}: network 'proxy' and `proxy_upstream`, the model API's URL, go "
            f"together; given are {spec.network!r} and {spec.proxy_upstream!r}"
        )
    if spec.proxy_upstream:
        split_base(spec.proxy_upstream)
    if spec.hostname and not HOSTNAME.fullmatch(spec.hostname):
        yield "host name", spec.hostname, "use up to 63 letters, digits, '-', '.' or '_'"
    if not _is_path(spec.workdir):
        yield "workdir", spec.workdir, "give an absolute path inside the sandbox, of printable characters"
    for limit, (least, accepted) in LEAST.items():
        value = getattr(spec.limits, limit)
        hosts_choice = limit == "disk" and value == 0
        if not (value is None or hosts_choice or (math.isfinite(value) and least <= value < 2**62)):
            yield f"limit {limit}", value, accepted
    total = 0
    for key, value in spec.environment.items():
        if not key or "=" in key or not key.isprintable() or " " in key:
            yield "environment key", key, "it has no '=', no blanks, and is not empty"
        if "\0" in value:
            yield f"environment {key}:", value, "a value has no NUL character"
        size = len(os.fsencode(key)) + len(os.fsencode(value)) + 2
        total += size
        if size > LONGEST_VALUE or total > MOST_ENVIRONMENT:
            yield f"environment {key}:", f"{size} bytes", "one has up to 128 KiB, all up to 1 MiB"
    for name, command in spec.services.items():
        if not name.strip() or not name.isprintable():
            yield "service", name, "its name is printable and not empty"
        if not command.strip() or "\0" in command:
            yield f"service {name}:", command, "give a command"


def _is_path(path: str) -> bool:
    parts = path.split("/")
    return (
        path.startswith("/")
        and path.isprintable()
        and ".." not in parts
        and len(os.fsencode(path)) < 4096
        and all(len(os.fsencode(part)) <= 255 for part in parts)
    )


def checked_label(label: str) -> None:
    """Raises UserError for what is not a short line."""
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise UserError(
            f"checkpoint: label {label[:60]!r} is not accepted; give one line of at most {LONGEST_LABEL} "
            "printable characters"
        )


def need_shell(root: Path, image: str) -> None:
    """Raises UserError where the root of an image has no shell that could run a command."""
    for shell in SHELLS:
        try:
            with opened(root) as folder, held(open_inside(folder, shell, os.O_PATH)) as file:
                mode = os.fstat(file).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and mode & 0o111:
            return
    raise UserError(
        f"image {image!r} has no shell: neither {' nor '.join(SHELLS)} is a program in it, and all commands "
        "run in one"
    )
