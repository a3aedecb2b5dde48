"""What a user asks for, looked at before anything is made: one sentence each, and nothing is left behind.

What the kernel or the shells cannot take (an equals sign in the name of a variable, a line feed in a host
name) would else come out as a fault of the host, in the middle, or not at all.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from windtunnel.agents.sandbox.model import NETWORKS, SandboxLimits, SandboxSpec
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
Refuse = Callable[[str, object, str], None]


def checked_spec(spec: SandboxSpec) -> None:
    """Raises UserError for the first field that cannot be."""
    checked_name(spec.name)

    def refuse(field: str, value: object, accepted: str) -> None:
        text = repr(value)
        excerpt = text if len(text) <= 80 else f"{text[:77]}..."
        raise UserError(f"sandbox {spec.name}: {field} {excerpt} is not accepted; {accepted}")

    if not spec.image.strip() or "\0" in spec.image:
        refuse(
            "image", spec.image, "give 'host', a folder, a tarball, an OCI image layout or 'docker://NAME'"
        )
    kind, listed, _ = spec.network.partition(":")
    if kind not in NETWORKS or (listed and kind != "egress"):
        refuse("network", spec.network, f"use {', '.join(NETWORKS)} or egress:HOST,*.HOST")
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
        refuse("host name", spec.hostname, "use up to 63 letters, digits, '-', '.' or '_'")
    if not _is_path(spec.workdir):
        refuse("workdir", spec.workdir, "give an absolute path inside the sandbox, of printable characters")
    _limits(spec.limits, refuse)
    _environment(spec.environment, refuse)
    for name, command in spec.services.items():
        if not name.strip() or not name.isprintable():
            refuse("service", name, "its name is printable and not empty")
        if not command.strip() or "\0" in command:
            refuse(f"service {name}:", command, "give a command")


def _limits(limits: SandboxLimits, refuse: Refuse) -> None:
    for field, (least, accepted) in LEAST.items():
        value = getattr(limits, field)
        if field == "disk" and value == 0:  # what the host gives
            continue
        if value is not None and not (math.isfinite(value) and least <= value < 2**62):
            refuse(f"limit {field}", value, accepted)


def _environment(environment: dict[str, str], refuse: Refuse) -> None:
    total = 0
    for key, value in environment.items():
        if not key or "=" in key or not key.isprintable() or " " in key:
            refuse("environment key", key, "it has no '=', no blanks, and is not empty")
        if "\0" in value:
            refuse(f"environment {key}:", value, "a value has no NUL character")
        size = len(os.fsencode(key)) + len(os.fsencode(value)) + 2
        total += size
        if size > LONGEST_VALUE or total > MOST_ENVIRONMENT:
            refuse(f"environment {key}:", f"{size} bytes", "one has up to 128 KiB, all up to 1 MiB")


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
