"""Profiles and plans as files: each a manifest (`store.objects.manifest`), so that one that was damaged or
changed by hand is refused as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.store.objects.files import ObjectError
from windtunnel.store.objects.manifest import seal, unseal
from windtunnel.training.gradsync.model import VERSION, SyncPlan, SyncProfile

PLAN, PROFILE = "plan.json", "profile.json"
"""Where a plan and what it was made for lie beside each other."""
T = TypeVar("T", SyncProfile, SyncPlan)
KINDS = {SyncPlan: "plan", SyncProfile: "profile"}


def write(path: Path, value: SyncProfile | SyncPlan) -> None:
    """As one file, whole or not at all.

    Raises:
        HostError: it cannot be written.
    """
    try:
        atomic.replace(path, seal(KINDS[type(value)], VERSION, value))
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}") from error


def check_place(out: Path) -> None:
    """Before what is written there is made.

    Raises:
        UserError: nothing can be written there.
    """
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"`out` {out}: a file in a folder that is there and may be written to is accepted")


def read(path: Path, kind: type[T]) -> T:
    """The inverse of `write`.

    Raises:
        UserError: the file cannot be read, or `write` did not write it so.
    """
    name = KINDS[kind]
    try:
        return unseal(kind, name, VERSION, path.read_bytes(), f"{name} {path}")
    except OSError as error:
        raise UserError(f"{name} {path}: {error.strerror}") from error
    except ObjectError as error:
        raise UserError(f"{error!s:.300}; a file written by windtunnel gradsync is accepted") from error
