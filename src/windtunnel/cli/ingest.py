"""``windtunnel ingest``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli import Group

if TYPE_CHECKING:
    from windtunnel.base.keys import Keys
    from windtunnel.data.ingest.live.calls import Settings

HERE = Path("ingest")
Workers = Annotated[str, typer.Option(metavar="auto|N", help="auto: as many as trainers need.")]
Least = Annotated[int, typer.Option("--min", min=1, help="Workers that there are at least, with auto.")]
Most = Annotated[int, typer.Option("--max", min=0, help="At most; 0: as many as this host has processors.")]
On = Annotated[str, typer.Option(metavar="ENGINE", help="Workers on ray or ray://HOST:PORT.")]
SecretFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The session's secret.")]
Tls = Annotated[Path | None, typer.Option(metavar="FILE", help="Encrypt: certificate, its key, the CA.")]

group = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Samples for trainers: read, transformed and batched by workers beside them.",
)


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="ingest")


@group.command("layout")
def layout(
    table: Annotated[str, typer.Argument(help="A Parquet file or a folder of them, here or at a URL.")],
    sessions: Annotated[
        list[Path], typer.Option(help="A file of a session that reads it (may be repeated).", metavar="YAML")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the table.")],
    rows: Annotated[
        int | None, typer.Option(min=1, help="Of a row group; default: as many as take 256 MiB of memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a table anew as its sessions read it: features as columns, those read together side by side.

    Example: windtunnel ingest layout table --sessions session.yaml --out flat
    """
    from windtunnel.base import units
    from windtunnel.base.plain import to_plain
    from windtunnel.cli import shown_progress
    from windtunnel.data.ingest import session
    from windtunnel.data.ingest.layout import lay_out

    known = [session.read(path) for path in sessions]
    with shown_progress("layout") as progress:
        made = lay_out(table, known, out, group_rows=rows, progress=progress)
    if as_json:
        typer.echo(json.dumps(to_plain(made) | {"folder": str(made.folder)}))
        return
    cells = [
        [path.name, *(words for one in pair for words in (
            f"{one.reads:,}", units.size(one.nbytes), f"{one.amplification:.2f}"
        ))]
        for path, *pair in zip(sessions, made.before, made.after, strict=True)
    ]  # fmt: skip
    told = ("reads", "bytes", "amplification")
    _print(
        "counted", ["session", *(f"{one} before" for one in told), *(f"{one} after" for one in told)], cells
    )
    typer.echo(
        f"{made.folder}: {len(made.order):,} columns, row groups of {made.group_rows:,} rows; the same rows"
        f" for every session; {units.share(made.reuse.popular)} of its bytes serve 80 % of the bytes read"
    )


@group.command("characterise")
def characterise(
    path: Annotated[Path, typer.Argument(metavar="SESSION", help="The file of a session (YAML).")],
    splits: Annotated[
        int | None, typer.Option(min=1, help="Read only so many splits; default: an epoch.")
    ] = None,
    demand: Annotated[
        float | None, typer.Option(help="Rows a second that the trainers take: what they would stall.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """What a session asks of storage, processors, memory and network, by reading it once.

    Example: windtunnel ingest characterise session.yaml
    """
    from windtunnel.base.plain import to_plain
    from windtunnel.cli import shown_progress
    from windtunnel.data.ingest import session
    from windtunnel.data.ingest.characterise import characterise, lines

    if demand is not None and not demand > 0:
        raise UserError(f"--demand {demand:g} is not accepted, accepted are rows a second above 0")
    with shown_progress("characterise") as progress:
        found = characterise(session.read(path), splits=splits, demand=demand, progress=progress)
    if as_json:
        typer.echo(json.dumps(to_plain(found) | {"amplification": found.amplification, "rate": found.rate}))
        return
    _print(str(path), ["what", "figure", "how it is known"], [list(one) for one in lines(found)])


def _print(title: str, headings: list[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown: Any = Table(title=title, title_justify="left", box=None, header_style="bold")
    for place, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if place == 1 else "left", overflow="fold")
    for line in cells:
        shown.add_row(*line)
    Console().print(shown)


@group.command("demo")
def demo(
    workers: Workers = "auto",
    least: Least = 1,
    most: Most = 0,
    seconds: Annotated[float, typer.Option(min=0.1, help="To train for, about.")] = 20.0,
    rows: Annotated[int, typer.Option(min=1024, help="Of the table.")] = 524_288,
    step: Annotated[float, typer.Option(min=0, help="Seconds of one; 0: by what a worker makes.")] = 0.0,
    kill: Annotated[bool, typer.Option("--kill", help="Kill a worker on the way.")] = False,
    loaders: Annotated[int, typer.Option(min=0, help="Processes of a DataLoader before the service.")] = 0,
    on: On = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a small model on a synthetic table through the service: stalls, ramp, every row once.

    Example: windtunnel ingest demo --workers auto --kill
    """
    from windtunnel.data.ingest.live.demo import demo as run

    with TemporaryDirectory(prefix="windtunnel-ingest-") as folder:
        told = run(
            Path(folder), _settings(workers, least, most), seconds=seconds, rows=rows, step=step, kill=kill,
            loaders=loaders, on=on,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
    else:
        for line in _words(told):
            typer.echo(line)
    if not told["exactly_once"]:
        raise LessError(f"{told['rows_wrong']} rows did not come exactly once an epoch")


@group.command("master")
def master(
    session: Annotated[Path, typer.Argument(metavar="SESSION", help="The session's file (YAML).")],
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Of its log, secret and address.")] = HERE,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    workers: Workers = "auto",
    least: Least = 1,
    most: Most = 0,
    ends: Annotated[str, typer.Option(help="Ranks with fewer batches: uneven, pad or drop.")] = "uneven",
    on_error: Annotated[str, typer.Option(help="A split that cannot be read: fail or skip.")] = "fail",
    secret: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="What clients and workers must know.")
    ] = None,
    tls_cert: Tls = None,
    tls_key: Tls = None,
    tls_ca: Tls = None,
    on: On = "",
) -> None:
    """Serve a session to trainers until interrupted; one that was killed goes on where its log ends.

    Example: windtunnel ingest master session.yaml --folder ingest --workers auto
    """
    from windtunnel.data.ingest import session as files
    from windtunnel.data.ingest.live.serve import serve

    def ready(address: str) -> None:
        typer.echo(f"Master   {address}\nSecret   {folder / 'secret'}")

    settings = _settings(workers, least, most, host=host, port=port, ends=ends, on_error=on_error)
    serve(
        files.read(session), folder, settings, secret=secret, tls=_tls(tls_cert, tls_key, tls_ca),
        on=on, ready=ready,
    )  # fmt: skip


@group.command("worker")
def worker(
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of the master.")],
    secret_file: SecretFile = None,
    host: Annotated[str, typer.Option(help="Address to serve at, as clients reach it.")] = "127.0.0.1",
    name: Annotated[str, typer.Option(help="Default: host and process.")] = "",
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for a master.")] = 30.0,
    tls_cert: Tls = None,
    tls_key: Tls = None,
    tls_ca: Tls = None,
) -> None:
    """Read, transform and batch splits for a master, until it lets this worker go.

    Example: windtunnel ingest worker --master 10.0.0.1:7070 --host 10.0.0.2 --secret-file secret
    """
    import signal

    from windtunnel.data.ingest.live.protocol import Lost
    from windtunnel.data.ingest.live.worker import Worker

    keys = _keys(secret_file, _tls(tls_cert, tls_key, tls_ca))
    made = Worker(name or f"{host}-{os.getpid()}", master, keys, host, patience)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: made.stop())
    typer.echo(f"Worker   {made.address}")
    try:
        made.run()
    except Lost as error:
        typer.echo(f"Ended    {error}")


@group.command("status")
def status(
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="Default: of the folder's master.")] = "",
    folder: Annotated[Path, typer.Option(metavar="DIR", help="The master's folder.")] = HERE,
    secret_file: SecretFile = None,
    tls_cert: Tls = None,
    tls_key: Tls = None,
    tls_ca: Tls = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how far a session is, its clients and its workers.

    Example: windtunnel ingest status --folder ingest
    """
    from windtunnel.data.ingest.live.protocol import Link

    address, kept = folder / "address", folder / "secret"
    if not master and not address.exists():
        raise UserError(f"ingest status: --folder {folder}: no master runs there; accepted is --master, too")
    keys = _keys(secret_file or (kept if kept.exists() else None), _tls(tls_cert, tls_key, tls_ca))
    link = Link(master or address.read_text(), keys)
    told = {**link.call("snapshot"), "served_by": link.call("workers")["workers"]}
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(
        f"Epoch    {told['epoch']} of {told['epochs']}: {told['done']} of {told['splits']} splits done"
    )
    if 0 < told["came"] < told["world"]:
        typer.echo(
            f"Waits    for {told['world'] - told['came']} of {told['world']} ranks; no split is given out "
            "before all are here, or back at their checkpoint"
        )
    for name, one in told["clients"].items():
        typer.echo(f"Client   {name}: {one['steps']} batches, waited {one['stalled']:.1f} s")
    for name, one in told["served_by"].items():
        typer.echo(f"Worker   {name} at {one['address']}: {one['made']} batches, busy {one['busy']:.1f} s")
    for one in told["skipped"]:
        typer.echo(f"Skipped  split {one['split']} ({one['rows']} rows): {one['why']}")
    if told["failed"]:
        typer.echo(f"Failed   {told['failed']}")


def _settings(workers: str, least: int, most: int, **more: Any) -> Settings:
    from windtunnel.data.ingest.live.calls import Settings
    from windtunnel.data.ingest.policy import Scaling

    for option, accepted in (("ends", ("uneven", "pad", "drop")), ("on_error", ("fail", "skip"))):
        if more.get(option, accepted[0]) not in accepted:
            raise UserError(
                f"--{option.replace('_', '-')} {more[option]}: accepted are {', '.join(accepted)}"
            )
    if workers != "auto" and not (workers.isascii() and workers.isdigit() and len(workers) < 5):
        raise UserError(
            f"--workers {workers}: accepted are auto and a whole number, 0 for only those of others"
        )
    most = most or max(least, os.cpu_count() or 1)
    if most < least:
        raise UserError(f"--max {most}: accepted is a number from --min, {least}, up")
    return Settings(workers=None if workers == "auto" else int(workers), scaling=Scaling(least, most), **more)


def _keys(secret: Path | None, tls: tuple[str, ...]) -> Keys:
    from dataclasses import replace

    from windtunnel.base.keys import VARIABLE, Keys
    from windtunnel.base.tls import Certificates

    keys = Keys.given(secret)
    if keys is None:
        raise UserError(
            f"--secret-file is missing: accepted is the file in the master's folder, or {VARIABLE}"
        )
    return replace(keys, tls=Certificates.load(tls)) if tls else keys


def _tls(*paths: Path | None) -> tuple[str, ...]:
    given = tuple(str(one) for one in paths if one is not None)
    if len(given) not in (0, 3):
        raise UserError("--tls-cert, --tls-key, --tls-ca: accepted are all three, or none")
    return given


def _words(told: dict[str, Any]) -> Iterator[str]:
    yield f"Rows     {told['rows']} in {told['epochs']} epochs, each exactly once: {told['exactly_once']}"
    yield f"Steps    {told['steps']} of {told['step_seconds'] * 1e3:.0f} ms in {told['seconds']:.1f} s"
    yield (
        f"Stalls   {told['stall']:.1%} of the time, {told['stall_second_half']:.1%} of its second half "
        f"({told['stall_second_half_within_epochs']:.1%} without first batches of epochs)"
    )
    yield f"Used     {told['processors_used']:.1f} of {told['processors']} processors, by workers and trainer"
    yield f"Ramp     {told['ramp_seconds']:.0f} s until there were none"
    yield "Workers  " + ", ".join(f"{one['workers']} from {one['seconds']:.0f} s" for one in told["workers"])
    if told["killed"]:
        yield f"Killed   {', '.join(told['killed'])}; {told['duplicates_dropped']} came twice, dropped"
