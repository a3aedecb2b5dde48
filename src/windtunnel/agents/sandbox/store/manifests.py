"""Manifests of checkpoints: rows of the home's database, sealed and checked whenever they are read.

A manifest is a `model.Manifest` in the form of `store.objects.manifest`, compressed. A checkpoint exists from
the moment its row is there, and the row is never replaced.
"""

from __future__ import annotations

import secrets
import sqlite3
import time

import zstandard

from windtunnel.agents.sandbox.model import Manifest
from windtunnel.agents.sandbox.store.database import Database
from windtunnel.agents.sandbox.store.pages import LEVEL
from windtunnel.base.errors import UserError
from windtunnel.store.objects.chunks import compress, decompress
from windtunnel.store.objects.files import ObjectError, checked, told
from windtunnel.store.objects.manifest import seal, unseal

VERSION = 3
_KIND = "manifest of a sandbox"


def new_id() -> str:
    """An id for a checkpoint: sorts by time (UTC, seconds), and is unique."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(3)


class Manifests:
    """All manifests of a home."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, manifest: Manifest) -> None:
        """Make the checkpoint exist. On the disk on return; an older one is never replaced."""
        id = checked(manifest.id)
        data = compress(seal(_KIND, VERSION, manifest), LEVEL)
        with told(f"manifest {id} cannot be written"), self._database.writing(durable=True) as db:
            try:
                db.execute("INSERT INTO manifest VALUES(?,?)", (id, data))
            except sqlite3.IntegrityError:
                raise ObjectError(f"there is a manifest {id} already, and one is never replaced") from None

    def load(self, id: str) -> Manifest:
        """The manifest of a checkpoint."""
        data = self._row(id)
        if data is None:
            raise ObjectError(f"checkpoint {id} is not there")
        where = f"manifest {id} in {self._database.path}"
        try:
            plain = decompress(data, zstandard.frame_content_size(data))
        except (zstandard.ZstdError, TypeError) as error:
            raise ObjectError(f"{where} is damaged: {error}") from None
        manifest = unseal(Manifest, _KIND, VERSION, plain, where)
        if manifest.id != id:
            raise ObjectError(f"{where} is the manifest of another checkpoint, {manifest.id}")
        return manifest

    def stored_bytes(self, id: str) -> int:
        """What the manifest of a checkpoint takes of the disk."""
        return len(self._row(id) or b"")

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
        """Forget a checkpoint, if there is one."""
        with told(f"manifest {id} cannot be removed"), self._database.writing() as db:
            db.execute("DELETE FROM manifest WHERE id=?", (checked(id),))

    def ids(self) -> list[str]:
        """Of all that there are, readable or not, sorted."""
        with told("the manifests cannot be read"), self._database.reading() as db:
            return [str(id) for (id,) in db.execute("SELECT id FROM manifest ORDER BY id")]

    def forget(self) -> None:
        """What is read next comes from the disk, whatever is remembered of it."""
        with told("the manifests cannot be read"):
            self._database.forget()

    def _row(self, id: str) -> bytes | None:
        with told(f"manifest {id} cannot be read"), self._database.reading() as db:
            row = db.execute("SELECT data FROM manifest WHERE id=?", (checked(id),)).fetchone()
        return row[0] if row else None
