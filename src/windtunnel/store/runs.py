"""Every run in a database: what went in, and what came out.

A run is written down when it begins, so that a crash leaves a trace, and completed when it ends. Its files
lie in a folder of its own, with a lock that its process holds as long as it lives. A run whose process is
gone without a word is written down as ``killed`` by whoever reads it next.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Engine, delete, select, update

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.base.paths import home
from windtunnel.store import alive
from windtunnel.store.database import (
    Json,
    Row,
    open_engine,
    plain,
    this_process,
    transaction,
    versions,
)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run as it was when it was read. ``status`` is ``running``, ``done``, ``failed`` or ``killed``;
    ``summary`` is None until it is done. ``created_at`` is in UTC, ``wall_time_s`` in seconds."""

    id: str
    capability: str
    created_at: datetime
    status: str
    inputs: Json
    seed: int
    versions: Json
    summary: Json | None
    directory: Path
    wall_time_s: float | None
    error: str | None
    _engine: Engine

    def take(self) -> None:
        """From now on this process executes the run, which may have lost another one."""
        alive.hold(self.directory)
        self._update(
            Row.status.in_(("running", "killed")), status="running", process=this_process(), error=None
        )

    def finish(self, summary: Json) -> None:
        """The run is done; ``summary`` is its result, whose ``wall_time_s`` is kept where it has one."""
        seconds = summary.get("wall_time_s")
        wall = float(seconds) if isinstance(seconds, int | float) else self._age()
        self._complete(status="done", summary=plain(summary), wall_time_s=wall)

    def fail(self, message: str) -> None:
        """The run ended without a result, for the reason given."""
        self._complete(status="failed", error=message, wall_time_s=self._age())

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised within is what the run failed with: a sentence for the user, or the kind of error
        and its words."""
        try:
            yield
        except (UserError, ScriptError) as error:
            self.fail(str(error))
            raise
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def _age(self) -> float:
        return (datetime.now(UTC) - self.created_at).total_seconds()

    def _complete(self, **values: Any) -> None:
        self._update(Row.status == "running", **values)
        alive.release(self.directory)

    def _update(self, of: ColumnElement[bool], **values: Any) -> None:
        with transaction(self._engine) as session:
            session.execute(update(Row).where(Row.id == self.id, of).values(**values))

    def as_dict(self) -> Json:
        """All but the connection, for JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}
        return fields | {"created_at": self.created_at.isoformat(), "directory": str(self.directory)}


def _settle(rows: Iterable[Row]) -> None:
    """Runs whose process ended without a word are killed from now on. Within a transaction."""
    for row in rows:
        if row.status == "running" and alive.is_gone(row.process, Path(row.directory)):
            row.status, row.error = "killed", "its process ended without a word"


@dataclass(frozen=True, slots=True)
class Store:
    """The runs of one home folder or database."""

    engine: Engine
    home: Path

    @classmethod
    def open(cls, url: str | None = None) -> Store:
        """Open the store, made if need be: ``url``, else ``$WINDTUNNEL_STORE``, else SQLite in `home`.

        Raises `UserError` when it cannot be used.
        """
        return cls(open_engine(url, home()), home())

    def begin(self, capability: str, inputs: Json, seed: int = 0) -> StoredRun:
        """Write down a new run and make its folder. Raises `UserError` when either cannot be written."""
        while True:
            created = datetime.now(UTC)
            name = f"{created:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
            folder = self.home / "runs" / name
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir()
            except FileExistsError:
                continue  # another run of this second has the same name
            except OSError as error:
                raise UserError(
                    f"{folder}: the folder of the run cannot be made ({error.strerror})"
                ) from error
            row = Row(
                id=name,
                capability=capability,
                created_at=created,
                status="running",
                inputs=plain(inputs),
                seed=int(seed),
                versions=versions(),
                process=this_process(),
                directory=str(folder),
            )
            try:
                alive.hold(folder)
                with transaction(self.engine) as session:
                    session.add(row)
            except UserError:
                alive.release(folder)
                folder.rmdir()
                if self._taken(name):
                    continue  # in a shared database, by a host with another home
                raise
            return self._read(row)

    def _taken(self, name: str) -> bool:
        with transaction(self.engine) as session:
            return session.get(Row, name) is not None

    def get(self, name: str) -> StoredRun:
        """The run with that id, or the only one whose id begins so, or the newest for ``"last"``.

        Raises `UserError` when there is none, or more than one.
        """
        newest = select(Row).order_by(Row.created_at.desc(), Row.id.desc())
        with transaction(self.engine) as session:
            if name == "last":
                runs = list(session.scalars(newest.limit(1)))
            else:
                runs = list(session.scalars(newest.where(Row.id.startswith(name, autoescape=True)).limit(4)))
            _settle(runs)
        exact = [row for row in runs if row.id == name]
        if not runs or not name:
            if name == "last":
                raise UserError("the store is empty: no run was kept yet, so there is no last one")
            raise UserError(f"{name!r} is not a run, give an id that `windtunnel runs list` shows")
        if len(runs) > 1 and not exact:
            some = ", ".join(row.id for row in runs[:3]) + (", …" if len(runs) > 3 else "")
            raise UserError(f"{name!r} stands for more than one run ({some}), give more of the id")
        return self._read((exact or runs)[0])

    def list(self, limit: int | None = None, capability: str | None = None) -> list[StoredRun]:
        """The newest ``limit`` runs (None: all), newest first, of one capability where it is given."""
        query = select(Row).order_by(Row.created_at.desc(), Row.id.desc()).limit(limit)
        if capability is not None:
            query = query.where(Row.capability == capability)
        with transaction(self.engine) as session:
            runs = list(session.scalars(query))
            _settle(runs)
            return [self._read(row) for row in runs]

    def newest(self, capability: str, accept: Callable[[StoredRun], bool]) -> StoredRun | None:
        """The newest run of a capability that is done and that ``accept`` takes; None where there is none."""
        done = select(Row).where(Row.capability == capability, Row.status == "done")
        ordered = done.order_by(Row.created_at.desc(), Row.id.desc()).execution_options(yield_per=16)
        with transaction(self.engine) as session:
            return next(filter(accept, map(self._read, session.scalars(ordered))), None)

    def remove(self, name: str) -> StoredRun:
        """Delete a run and its files; returns what it was. Raises `UserError` for one that is running."""
        run = self.get(name)
        if run.status == "running":
            raise UserError(f"{run.id}: the run is still running, end it before removing it")
        # The folder goes first: a row without files can be removed again, files without a row are forgotten.
        # It is one that `begin` made, or this is not the place to delete anything.
        if run.directory.name == run.id and run.directory.is_dir():
            try:
                shutil.rmtree(run.directory)
            except OSError as error:
                raise UserError(f"{run.directory}: the files cannot be deleted ({error.strerror})") from error
        with transaction(self.engine) as session:
            session.execute(delete(Row).where(Row.id == run.id))
        return run

    def _read(self, row: Row) -> StoredRun:
        # SQLite keeps no time zone; everything in the table is UTC.
        created = row.created_at if row.created_at.tzinfo else row.created_at.replace(tzinfo=UTC)
        return StoredRun(
            id=row.id,
            capability=row.capability,
            created_at=created.astimezone(UTC),
            status=row.status,
            inputs=row.inputs,
            seed=row.seed,
            versions=row.versions,
            summary=row.summary,
            directory=Path(row.directory),
            wall_time_s=row.wall_time_s,
            error=row.error,
            _engine=self.engine,
        )
