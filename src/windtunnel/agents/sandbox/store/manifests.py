"""Manifests of checkpoints on the disk, sealed and checked whenever they are read.

``<folder>/<id>/manifest.json`` is a `model.Manifest` in the form of `store.objects.manifest`. It appears
whole, by a link, and is never replaced: a checkpoint exists from the moment it is there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from windtunnel.agents.sandbox.model import Manifest
from windtunnel.base.atomic import sync_folder, write_new
from windtunnel.base.errors import UserError
from windtunnel.linux.system import opened
from windtunnel.store.objects.files import ObjectError, checked, told
from windtunnel.store.objects.manifest import seal, unseal

VERSION = 2
NAME = "manifest.json"
_KIND = "manifest of a sandbox"


def new_id() -> str:
    """An id for a checkpoint: sorts by time (UTC, seconds), and is unique."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(3)


class Manifests:
    """All manifests in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, manifest: Manifest) -> None:
        """Make the checkpoint exist. On the disk on return; an older one is never replaced."""
        path = self._path(manifest.id)
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            sync_folder(self._folder)
            write_new(path, seal(_KIND, VERSION, manifest), mode=0o600)
        except FileExistsError:
            raise ObjectError(
                f"there is a manifest {manifest.id} already, and one is never replaced"
            ) from None
        except OSError as error:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
            raise ObjectError(f"manifest {path} cannot be written: {error}") from error

    def load(self, id: str, *, cold: bool = False) -> Manifest:
        """The manifest of a checkpoint; ``cold``: as the disk has it, whatever the kernel remembers."""
        path = self._path(id)
        with told(f"manifest {path} cannot be read"):
            try:
                if cold:
                    with opened(path) as given:
                        os.posix_fadvise(given, 0, 0, os.POSIX_FADV_DONTNEED)
                data = path.read_bytes()
            except FileNotFoundError:
                raise ObjectError(f"checkpoint {id} is not there: {path} is missing") from None
        manifest = unseal(Manifest, _KIND, VERSION, data, str(path))
        if manifest.id != id:
            raise ObjectError(f"{path} is the manifest of another checkpoint, {manifest.id}")
        return manifest

    def find(self, prefix: str) -> Manifest:
        """The checkpoint whose id is ``prefix``, or the only one whose id begins with it."""
        return self.load(self.named(prefix))

    def named(self, prefix: str) -> str:
        """The id that is ``prefix``, or the only one that begins with it; readable or not."""
        ids = self.ids()
        found = [prefix] if prefix in ids else [id for id in ids if prefix and id.startswith(prefix)]
        if not found:
            known = f"the newest are {', '.join(ids[-3:])}" if ids else "there is none yet"
            raise UserError(f"checkpoint {prefix!r} is not known; {known}")
        if len(found) > 1:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(f"checkpoint {prefix!r} is ambiguous: {', '.join(found[:5])}{more}")
        return found[0]

    def all(self) -> tuple[list[Manifest], list[str]]:
        """Those that can be read, in the order of their ids, and what is wrong with each of the others."""
        good, problems = [], []
        for id in self.ids():
            try:
                good.append(self.load(id))
            except ObjectError as error:
                problems.append(str(error))
        return good, problems

    def remove(self, id: str) -> None:
        """Forget a checkpoint, if there is one: the manifest goes first, so never half of one is read."""
        path = self._path(id)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)
        shutil.rmtree(path.parent, ignore_errors=True)

    def _path(self, id: str) -> Path:
        return self._folder / checked(id) / NAME

    def ids(self) -> list[str]:
        """Of all that there are, readable or not, sorted."""
        return sorted(
            entry.name for entry in os.scandir(self._folder) if os.path.exists(os.path.join(entry.path, NAME))
        )
