"""Process images, kept page by page: what an image shares with any earlier one is stored once.

Each image is one file (see ``packs``): its new pages and its recipe. It is written beside, synced, renamed,
and only then linked under its id, so a crash at any point leaves all earlier images and at most garbage,
which ``collect`` removes. Readers and writers of new images share a file lock; only ``collect``, which
removes and rewrites packs, holds it alone.

A page that equals the one in the same place of the image before (``like``) is not even hashed. The newest
images also stay as they were written (see `RawImages`), within ``keep_raw`` bytes.

Source: Crab (arXiv 2604.28138), section 5, keeps whole dumps; pages addressed by content are ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.live.images import reader, writer
from windtunnel.agents.sandbox.live.images.packs import Recipe, opened
from windtunnel.agents.sandbox.live.images.writer import Known
from windtunnel.base.atomic import PART
from windtunnel.store.objects.files import ObjectError, checked, told

IMAGE = ".image"

Marks = dict[str, tuple[int, int]]
"""Size and time of change (ns) of each file of an image."""


@dataclass(frozen=True)
class StoredImage:
    """What ``keep`` stored. ``bytes_raw``: size of the image; ``bytes_new``: by how much the store grew."""

    bytes_raw: int
    bytes_new: int


class PageStore:
    """The images in ``folder``. Any method may be called from several threads and processes at once."""

    def __init__(self, folder: Path, *, keep_raw: int = 2 * 2**30, workers: int | None = None) -> None:
        self._folder, self._work = folder / "images", folder / "work"
        self._lock_path = folder / "lock"
        with told(f"the page store {folder} cannot be opened"):
            for one in (self._folder, self._work, folder / "raw"):
                one.mkdir(parents=True, exist_ok=True)
            self._lock_path.touch()
            self._raw = RawImages(folder / "raw", keep_raw)
            for path in list(self._work.iterdir()):
                # what a process that is gone has left
                if not Path("/proc", path.name.split("-")[0]).exists():
                    shutil.rmtree(path, ignore_errors=True)
        self._jobs = ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1), "windtunnel-pages")
        self._young: set[str] = set()
        self._known: Known | None = None
        self._loading = threading.Lock()

    def keep(self, id: str, images: Path, *, like: str = "") -> StoredImage:
        """Store the folder ``images`` under ``id``; on the disk on return. The folder stays the caller's.

        ``like``: an image that is probably much the same, best the one before of the same sandbox.
        """
        path = self._path(checked(id))
        if path.exists():
            raise ObjectError(f"there is an image {id} already, and an image is never replaced")
        with self._held(fcntl.LOCK_SH):
            known = self._load()
            base = None
            folder = self._raw.trusted(like) if like else None
            if folder is not None:
                with contextlib.suppress(ObjectError), opened(self._path(like)) as pack:
                    base = (folder, pack.recipe())
            with told(f"image {id} cannot be kept"):
                kept = writer.keep(self._folder, id, images, known, base, self._jobs)
            self._young.add(id)
            with contextlib.suppress(OSError):
                self._raw.put(id, images)
        return StoredImage(*kept)

    def materialise(self, id: str, into: Path) -> None:
        """Write the files of an image into the folder ``into``, which must be empty or not there yet.

        Every byte is one that was kept, or ObjectError names what is damaged and nothing is left in ``into``.
        The files may share their bytes with a cache, so they must not be written to.
        """
        with self._held(fcntl.LOCK_SH), told(f"image {id} cannot be written to {into}"):
            recipe = self.recipe(id)
            made = not into.exists()
            into.mkdir(parents=True, exist_ok=True)
            if any(into.iterdir()):
                raise ObjectError(f"the folder {into} for image {id} is not empty")
            try:
                self._recheck(recipe)
                if not self._raw.give(id, into):
                    reader.materialise(self._folder, recipe, into, self._jobs)
                    self._raw.put(id, into)
            except (OSError, ObjectError):
                for file in into.iterdir():
                    file.unlink()
                if made:
                    into.rmdir()
                raise

    def recipe(self, id: str) -> Recipe:
        """How an image is put together."""
        path = self._path(checked(id))
        if not path.exists():
            raise ObjectError(f"there is no image {id}")
        with opened(path) as pack:
            return pack.recipe()

    def ids(self) -> list[str]:
        return sorted(name.removesuffix(IMAGE) for name in os.listdir(self._folder) if name.endswith(IMAGE))

    def drop(self, id: str) -> None:
        """Forget an image, if there is one. Its bytes go when ``collect`` finds that no other needs them."""
        self._young.discard(id)
        with contextlib.suppress(FileNotFoundError):
            self._path(checked(id)).unlink()
        self._raw.forget(id)

    def collect(self, needed: Iterable[str]) -> int:
        """Drop all images but the ``needed`` ones, and the pages that no other has; returns bytes freed.

        Images that this process has kept stay until ``drop`` names them: what needs them may be about to be
        written. When a needed image cannot be read nothing is removed, since its pages are not known.
        """
        with self._held(fcntl.LOCK_EX):
            wanted = {*needed, *self._young}
            for id in self.ids():
                if id not in wanted:
                    self.drop(id)
            with told("the page store cannot be collected"):
                self._advance()
                freed = writer.sweep(self._folder)
            self._raw.forget_all_but(set(self.ids()))
            return freed

    def verify(self, id: str) -> list[str]:
        """Read every page of an image from its pack; what is damaged, in words."""
        with self._held(fcntl.LOCK_SH):
            try:
                return reader.problems(self._folder, self.recipe(id), self._jobs)
            except ObjectError as error:
                return [str(error)]

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for the time being, on the disk of the store."""
        with told("the page store has no room to work in"):
            folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._work))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}{IMAGE}"

    def _recheck(self, recipe: Recipe) -> None:
        """Check a raw image that was here before this process; a wrong one is removed."""
        folder = self._raw.untrusted(recipe.id)
        if folder is None:
            return
        with contextlib.suppress(ObjectError, OSError):
            if reader.matches(self._folder, recipe, folder):
                self._raw.trust(recipe.id)
                return
        self._raw.forget(recipe.id)

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        """The lock of the store. A fresh descriptor each time: so threads exclude each other too."""
        with self._lock_path.open("rb") as file:
            fcntl.flock(file, kind)
            yield

    def _advance(self) -> None:
        """Tell every process that what it knows of places is out of date: packs are about to go."""
        self._known = None
        count = self._epoch() + 1
        with self._lock_path.open("r+b") as file:
            file.write(count.to_bytes(8, "little"))

    def _epoch(self) -> int:
        return int.from_bytes(self._lock_path.read_bytes(), "little")

    def _load(self) -> Known:
        """Digests of all pages; read anew when some process has collected since."""
        with self._loading:
            epoch = self._epoch()
            if self._known is None or self._known.epoch != epoch:
                self._known = writer.load(self._folder, epoch)
            return self._known


class RawImages:
    """The newest images as CRIU wrote them, so that a restore or a fork soon after costs links, not reads.

    An image is taken in, and given out, by hard links. What this process has put here it trusts as long as
    size and time of change of every file stay the same; what it finds from before has to be checked by the
    store first, since after a crash of the host files that were never synced may hold anything. The cache may
    be deleted at any time; its oldest images go when they hold more than ``limit`` bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._known: dict[str, Marks] = {}
        self._sizes: dict[str, int] = {}
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            if path.name.endswith(PART):
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._sizes[path.name] = sum(file.stat().st_size for file in path.iterdir())

    def put(self, id: str, images: Path) -> None:
        """Take the files of ``images`` in; silently not, when links cannot be made there."""
        marks = _marks(images)
        size = sum(length for length, _ in marks.values())
        if size > self._limit:
            return
        temporary = self._folder / f"{id}.{secrets.token_hex(4)}{PART}"
        try:
            temporary.mkdir(mode=0o700)
            for name in marks:
                os.link(images / name, temporary / name)
            temporary.rename(self._folder / id)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            return
        with self._lock:
            self._known[id] = marks
            self._sizes[id] = size
            over = sum(self._sizes.values()) - self._limit
            old = []
            for name, held in self._sizes.items():
                if over <= 0:
                    break
                old.append(name)
                over -= held
        for name in old:
            self.forget(name)

    def trust(self, id: str) -> None:
        """The store has checked this image."""
        with contextlib.suppress(OSError):
            marks = _marks(self._folder / id)
            with self._lock:
                self._known[id] = marks

    def trusted(self, id: str) -> Path | None:
        """The folder of an image that is known to be right; one that somebody changed is removed."""
        folder, known = self._folder / id, self._known.get(id)
        if known is None:
            return None
        with contextlib.suppress(OSError):
            if _marks(folder) == known:
                return folder
        self.forget(id)
        return None

    def untrusted(self, id: str) -> Path | None:
        """The folder of an image that was found here and not checked yet."""
        folder = self._folder / id
        return folder if id not in self._known and folder.is_dir() else None

    def forget(self, id: str) -> None:
        with self._lock:
            self._known.pop(id, None)
            self._sizes.pop(id, None)
        shutil.rmtree(self._folder / id, ignore_errors=True)

    def forget_all_but(self, ids: set[str]) -> None:
        for path in list(self._folder.iterdir()):
            if path.name not in ids and not path.name.endswith(PART):
                self.forget(path.name)

    def give(self, id: str, into: Path) -> bool:
        """Link the files of an image into ``into``; False, with nothing left, when it is not to be had."""
        folder = self.trusted(id)
        if folder is None:
            return False
        names = sorted(self._known.get(id, ()))
        try:
            for name in names:
                os.link(folder / name, into / name)
        except OSError:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (into / name).unlink()
            return False
        return True


def _marks(folder: Path) -> Marks:
    marks: Marks = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            marks[entry.name] = (found.st_size, found.st_mtime_ns)
    return marks
