"""``windtunnel ingest``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import (
    Host,
    Json,
    Port,
    TlsCa,
    TlsCert,
    TlsKey,
    choice,
    emit,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from windtunnel.base.keys import Keys
    from windtunnel.data.ingest.live.calls import MasterSettings

HERE = Path("ingest")
Workers = Annotated[
    str, typer.Option(metavar="auto|N", help="Number of workers; auto: as many as trainers need.")
]
Least = Annotated[int, typer.Option("--min", min=1, help="Fewest workers, with auto.")]
Most = Annotated[int, typer.Option("--max", min=0, help="Most workers; 0: the number of this host's CPUs.")]
On = Annotated[str, typer.Option(metavar="ENGINE", help="Run workers on ray or ray://HOST:PORT.")]
SecretFile = Annotated[Path | None, typer.Option(metavar="FILE", help="File with the session's secret.")]

group = new_group("Read, transform and batch training samples with separate workers (Meta's DSI).")


@group.command("layout")
def layout(
    table: Annotated[str, typer.Argument(help="A Parquet file or a folder of them, here or at a URL.")],
    sessions: Annotated[
        list[Path],
        typer.Option(help="File of a session that reads the table (may be repeated).", metavar="YAML"),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the table.")],
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of a row group. Default: 256 MiB of memory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rewrite a table for its sessions: features become columns, and those read together lie together.

    Example: windtunnel ingest layout table --sessions session.yaml --out flat
    """
    from windtunnel.base import units
    from windtunnel.base.plain import to_plain
    from windtunnel.cli import progress_bar
    from windtunnel.data.ingest import session
    from windtunnel.data.ingest.layout import lay_out

    sessions_read = [session.read(path) for path in sessions]
    with progress_bar("layout") as progress:
        new = lay_out(table, sessions_read, out, group_rows=rows, progress=progress)
    if as_json:
        return print_json(to_plain(new) | {"folder": str(new.folder)})
    cells = []
    for path, before, after in zip(sessions, new.before, new.after, strict=True):
        counts = [
            text
            for row in (before, after)
            for text in (f"{row.reads:,}", units.size(row.nbytes), f"{row.amplification:.2f}")
        ]
        cells.append((path.name, *counts))
    kinds = ("reads", "bytes", "amplification")
    head = ("session", *(f"{kind} {when}" for when in ("before", "after") for kind in kinds))
    print_table(head, cells, "counted")
    typer.echo(
        f"{new.folder}: {len(new.order):,} columns, row groups of {new.group_rows:,} rows; the same rows"
        f" for every session; {units.share(new.reuse.popular)} of its bytes serve 80 % of the bytes read"
    )


@group.command("characterise")
def characterise(
    path: Annotated[Path, typer.Argument(metavar="SESSION", help="The file of a session (YAML).")],
    splits: Annotated[int | None, typer.Option(min=1, help="Splits to read. Default: an epoch.")] = None,
    demand: Annotated[
        float | None, typer.Option(help="Rows per second that trainers take, to compute their stalls.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what a session needs of storage, CPU, memory and network by reading it once.

    Example: windtunnel ingest characterise session.yaml
    """
    from windtunnel.base.plain import to_plain
    from windtunnel.cli import progress_bar
    from windtunnel.data.ingest import session
    from windtunnel.data.ingest.characterise import characterise, lines

    if demand is not None and not demand > 0:
        raise UserError(f"`demand` {demand:g} is not accepted; accepted are rows a second above 0")
    with progress_bar("characterise") as progress:
        character = characterise(session.read(path), splits=splits, demand=demand, progress=progress)
    if as_json:
        return print_json(
            to_plain(character) | {"amplification": character.amplification, "rate": character.rate}
        )
    print_table(("what", ">figure", "how it is known"), lines(character), str(path))


@group.command("demo")
def demo(
    workers: Workers = "auto",
    least: Least = 1,
    most: Most = 0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate training time in seconds.")] = 20.0,
    rows: Annotated[int, typer.Option(min=1024, help="Rows of the table.")] = 524_288,
    step: Annotated[
        float, typer.Option(min=0, help="Seconds of a training step; 0: from a worker's throughput.")
    ] = 0.0,
    kill: Annotated[bool, typer.Option("--kill", help="Kill a worker during the demo.")] = False,
    on: On = "",
    as_json: Json = False,
) -> None:
    """Train a small model on a synthetic table through the service, and check that each row came once.

    Example: windtunnel ingest demo --workers auto --kill
    """
    from windtunnel.data.ingest.live.demo import demo as run

    with TemporaryDirectory(prefix="windtunnel-ingest-") as folder:
        result = run(
            Path(folder), _settings(workers, least, most), seconds=seconds, rows=rows, step=step, kill=kill,
            on=on,
        )  # fmt: skip
    emit(as_json, result, _demo_lines(result))
    if not result["exactly_once"]:
        raise LessError(f"{result['rows_wrong']} rows did not come exactly once an epoch")


@group.command("master")
def master(
    session: Annotated[Path, typer.Argument(metavar="SESSION", help="The session's file (YAML).")],
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the session's log, secret and address.")
    ] = HERE,
    host: Host = "127.0.0.1",
    port: Port = 0,
    workers: Workers = "auto",
    least: Least = 1,
    most: Most = 0,
    ends: Annotated[str, typer.Option(help="Ranks with fewer batches: uneven, pad or drop.")] = "uneven",
    on_error: Annotated[
        str, typer.Option(help="What to do with an unreadable split: fail or skip.")
    ] = "fail",
    secret: Annotated[
        Path | None,
        typer.Option("--secret-file", metavar="FILE", help="File with the secret of clients and workers."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    on: On = "",
) -> None:
    """Serve a session to trainers until interrupted. After a kill it continues from its log.

    Example: windtunnel ingest master session.yaml --folder ingest --workers auto
    """
    from windtunnel.base.tls import certificate_files
    from windtunnel.data.ingest import session as files
    from windtunnel.data.ingest.live.serve import serve

    def ready(address: str) -> None:
        typer.echo(f"Master   {address}\nSecret   {folder / 'secret'}")

    settings = _settings(workers, least, most, host=host, port=port, ends=ends, on_error=on_error)
    tls = certificate_files(tls_cert, tls_key, tls_ca)
    serve(files.read(session), folder, settings, secret=secret, tls=tls, on=on, ready=ready)


@group.command("worker")
def worker(
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the master.")],
    secret_file: SecretFile = None,
    host: Annotated[str, typer.Option(help="Address to serve at, as clients see it.")] = "127.0.0.1",
    name: Annotated[str, typer.Option(help="Name of the worker. Default: host and process.")] = "",
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for a master.")] = 30.0,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Read, transform and batch splits for a master until the session ends.

    Example: windtunnel ingest worker --master 10.0.0.1:7070 --host 10.0.0.2 --secret-file secret
    """
    import signal

    from windtunnel.base.tls import certificate_files
    from windtunnel.data.ingest.live.protocol import ServerLost
    from windtunnel.data.ingest.live.worker import WorkerServer

    keys = _keys(secret_file, certificate_files(tls_cert, tls_key, tls_ca))
    process = WorkerServer(name or f"{host}-{os.getpid()}", master, keys, host, patience)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.stop())
    typer.echo(f"Worker   {process.address}")
    try:
        process.run()
    except ServerLost as error:
        typer.echo(f"Ended    {error}")


@group.command("status")
def status(
    master: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the master. Default: from the folder.")
    ] = "",
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the master.")] = HERE,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Show the progress of a session, its clients and its workers.

    Example: windtunnel ingest status --folder ingest
    """
    from windtunnel.base.tls import certificate_files
    from windtunnel.data.ingest.live.protocol import FlightLink

    address, secret = folder / "address", folder / "secret"
    if not master and not address.exists():
        raise UserError(f"ingest status: no master runs in --folder {folder}; give its folder, or --master")
    tls = certificate_files(tls_cert, tls_key, tls_ca)
    keys = _keys(secret_file or (secret if secret.exists() else None), tls)
    link = FlightLink(master or address.read_text(), keys)
    state = link.call("snapshot")
    emit(as_json, state, _status_lines(state))


def _status_lines(state: dict[str, Any]) -> Iterator[str]:
    yield f"Epoch    {state['epoch']} of {state['epochs']}: {state['done']} of {state['splits']} splits done"
    if 0 < state["came"] < state["world"]:
        yield (
            f"Waits    for {state['world'] - state['came']} of {state['world']} ranks; no split is given out "
            "before all are here, or back at their checkpoint"
        )
    for name, client in state["clients"].items():
        yield f"Client   {name}: {client['steps']} batches, waited {client['stalled']:.1f} s"
    for name, process in state["served_by"].items():
        counts = f"{process['produced']} batches, busy {process['busy']:.1f} s"
        yield f"Worker   {name} at {process['address']}: {counts}"
    for split in state["skipped"]:
        yield f"Skipped  split {split['split']} ({split['rows']} rows): {split['why']}"
    if state["failed"]:
        yield f"Failed   {state['failed']}"


def _settings(workers: str, least: int, most: int, **more: Any) -> MasterSettings:
    from windtunnel.data.ingest.live.calls import MasterSettings
    from windtunnel.data.ingest.policy import ScalingBounds

    for option, accepted in (("ends", ("uneven", "pad", "drop")), ("on_error", ("fail", "skip"))):
        choice(option, more.get(option, accepted[0]), accepted)
    if workers != "auto" and not (workers.isascii() and workers.isdigit() and len(workers) < 5):
        raise UserError(
            f"--workers {workers}: accepted are auto and a whole number, 0 for only those of others"
        )
    most = most or max(least, os.cpu_count() or 1)
    if most < least:
        raise UserError(f"--max {most}: accepted is a number from --min, {least}, up")
    return MasterSettings(
        workers=None if workers == "auto" else int(workers), scaling=ScalingBounds(least, most), **more
    )


def _keys(secret: Path | None, tls: tuple[str, ...]) -> Keys:
    from dataclasses import replace

    from windtunnel.base.keys import VARIABLE, Keys
    from windtunnel.base.tls import Certificates

    keys = Keys.from_option(secret)
    if keys is None:
        raise UserError(
            f"--secret-file is missing: accepted is the file in the master's folder, or {VARIABLE}"
        )
    return replace(keys, tls=Certificates.load(tls)) if tls else keys


def _demo_lines(demo: dict[str, Any]) -> Iterator[str]:
    yield f"Rows     {demo['rows']} in {demo['epochs']} epochs, each exactly once: {demo['exactly_once']}"
    yield f"Steps    {demo['steps']} of {demo['step_seconds'] * 1e3:.0f} ms in {demo['seconds']:.1f} s"
    yield (
        f"Stalls   {demo['stall']:.1%} of the time, {demo['stall_second_half']:.1%} of its second half "
        f"({demo['stall_second_half_within_epochs']:.1%} without first batches of epochs)"
    )
    yield f"Used     {demo['processors_used']:.1f} of {demo['processors']} processors, by workers and trainer"
    yield f"Ramp     {demo['ramp_seconds']:.0f} s until there were none"
    yield "Workers  " + ", ".join(f"{row['workers']} from {row['seconds']:.0f} s" for row in demo["workers"])
    if demo["killed"]:
        yield f"Killed   {', '.join(demo['killed'])}; {demo['duplicates_dropped']} came twice, dropped"
