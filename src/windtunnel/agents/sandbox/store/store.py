"""Process images, kept page by page: what an image shares with any earlier one is stored once.

Each image is one file (see ``packs``): its new pages and its recipe. It is written beside, synced, renamed,
and only then linked under its id, so a crash at any point leaves all earlier images and at most garbage,
which ``collect`` removes. Readers and writers of new images share a file lock; only ``collect``, which
removes and rewrites packs, holds it alone.

A page that equals the one in the same place of the image before (``like``) is not even hashed. The newest
images also stay as they were written (see `RawImages`), within ``keep_raw`` bytes; what is restored from them
is hashed all the same. Damage that was found is remembered (see ``scrub``): such pages are stored anew with
the next image that has them.

Source: Crab (arXiv 2604.28138), section 5, keeps whole dumps; pages addressed by content are ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.store import reader, writer
from windtunnel.agents.sandbox.store.packs import Recipe, opened
from windtunnel.agents.sandbox.store.raw import RawImages
from windtunnel.agents.sandbox.store.scrub import Damaged, Found, Unchanged, scrub
from windtunnel.agents.sandbox.store.writer import Known
from windtunnel.store.objects.files import ObjectError, checked, told

IMAGE = ".image"


@dataclass(frozen=True)
class StoredImage:
    """What ``keep`` stored. ``bytes_raw``: size of the image; ``bytes_new``: by how much the store grew."""

    bytes_raw: int
    bytes_new: int


class StaleCopy(ObjectError):
    """The copy of an image in the cache was not what was kept, and is dropped; the store has the image."""


@dataclass(frozen=True)
class Scrubbed:
    """Bytes that were read from the disk, and what is damaged of each image, in words."""

    bytes: int
    damage: dict[str, list[str]]


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
        self._damaged = Damaged(folder / "damaged.json")
        self._unchanged = Unchanged(self._folder)

    def keep(self, id: str, images: Path, *, like: str = "") -> StoredImage:
        """Store the folder ``images`` under ``id``; on the disk on return. The folder stays the caller's.

        ``like``: an image that is probably much the same, best the one before of the same sandbox.
        """
        path = self._path(checked(id))
        if path.exists():
            raise ObjectError(f"there is an image {id} already, and an image is never replaced")
        with self._held(fcntl.LOCK_SH):
            known = self._load()
            self._look_at(known.packs)
            known = self._load()
            base = None
            folder = self._raw.trusted(like) if like else None
            if folder is not None:
                with contextlib.suppress(ObjectError), opened(self._path(like)) as pack:
                    recipe = pack.recipe()
                    base = None if self._damaged.hit(recipe) else (folder, recipe)
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
        try:
            self.begin(id, into)()
        except StaleCopy:
            for file in into.iterdir():
                file.unlink()
            self.begin(id, into)()

    def begin(self, id: str, into: Path) -> Callable[[], None]:
        """`materialise`, of which the check of bytes that come from the cache may still be under way.

        What is returned waits for it, and raises StaleCopy when they are not those that were kept.
        """
        with self._held(fcntl.LOCK_SH), told(f"image {id} cannot be written to {into}"):
            recipe = self.recipe(id)
            self._look_at(recipe.packs)
            wrong = self._damaged.hit(recipe)
            if wrong:
                raise ObjectError(f"image {id} is damaged: {'; '.join(wrong)}")
            made = not into.exists()
            into.mkdir(parents=True, exist_ok=True)
            if any(into.iterdir()):
                raise ObjectError(f"the folder {into} for image {id} is not empty")
            try:
                checked = self._recheck(recipe)
                if self._raw.give(id, into):
                    if checked:
                        return lambda: None
                    return self._jobs.submit(self._confirm, recipe, into).result
                reader.materialise(self._folder, recipe, into, self._jobs)
                self._raw.put(id, into)
            except (OSError, ObjectError) as error:
                for file in into.iterdir():
                    file.unlink()
                if made:
                    into.rmdir()
                if isinstance(error, ObjectError):
                    self._scrub(recipe.packs)
                raise
        return lambda: None

    def recipe(self, id: str, *, cold: bool = False) -> Recipe:
        """How an image is put together; ``cold``: as the disk has it."""
        path = self._path(checked(id))
        if not path.exists():
            raise ObjectError(f"there is no image {id}")
        with opened(path, cold=cold) as pack:
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
                self._unchanged.forget()
                self._damaged.keep_only({path.stem for path in self._folder.glob("*.pack")})
            self._raw.forget_all_but(set(self.ids()))
            return freed

    def verify(self, id: str) -> list[str]:
        """Read every page of an image from the disk; what is damaged, in words."""
        return self.scrub([id]).damage[id]

    def scrub(self, ids: Iterable[str]) -> Scrubbed:
        """Read all that some images need from the disk, each pack once, and check every page.

        What is damaged serves no restore from now on, and later images store it anew.
        """
        damage: dict[str, list[str]] = {}
        recipes: dict[str, Recipe] = {}
        with self._held(fcntl.LOCK_SH), told("the page store cannot be scrubbed"):
            for id in ids:
                try:
                    recipes[id] = self.recipe(id, cold=True)
                except ObjectError as error:
                    damage[id] = [str(error)]
            found = self._scrub(sorted({pack for recipe in recipes.values() for pack in recipe.packs}))
            for id, recipe in recipes.items():
                damage[id] = self._damaged.hit(recipe)
        return Scrubbed(sum(one.bytes for one in found.values()), damage)

    def _scrub(self, packs: Sequence[str]) -> dict[str, Found]:
        """Look at packs and remember what is damaged; other processes then learn of it, too."""
        found = {}
        for pack in packs:
            found[pack] = scrub(self._folder / f"{pack}.pack", self._jobs)
            self._unchanged.see([pack])
            # on a full disk this process remembers it all the same
            with contextlib.suppress(OSError):
                if self._damaged.note(pack, found[pack]):
                    self._advance()
        return found

    def _look_at(self, packs: Sequence[str]) -> None:
        """Check those packs that somebody else has changed."""
        self._scrub(self._unchanged.suspects(packs))

    def _confirm(self, recipe: Recipe, images: Path) -> None:
        """Raises StaleCopy when the files of an image that came from the cache are not those kept."""
        with self._held(fcntl.LOCK_SH), contextlib.suppress(ObjectError, OSError):
            if reader.matches(self._folder, recipe, images):
                return
        self._raw.forget(recipe.id)
        raise StaleCopy(f"the copy of image {recipe.id} in the cache is damaged")

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

    def _recheck(self, recipe: Recipe) -> bool:
        """Whether there is a raw image from before this process, and it is right; a wrong one is removed."""
        folder = self._raw.untrusted(recipe.id)
        if folder is None:
            return False
        with contextlib.suppress(ObjectError, OSError):
            if reader.matches(self._folder, recipe, folder):
                self._raw.trust(recipe.id)
                return True
        self._raw.forget(recipe.id)
        return False

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
                self._known = writer.load(self._folder, epoch, self._damaged)
            return self._known
