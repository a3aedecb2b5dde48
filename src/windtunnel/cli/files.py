"""``windtunnel files``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, choice, emit, quantity

if TYPE_CHECKING:
    from windtunnel.data.files.model import Status

group = new_group("Replicated files on the disks of several hosts (LineFS, Hyperloop).")
Name = Annotated[str, typer.Option(help="Name of the files in URLs lines://NAME on this host.")]
ModeOption = Annotated[
    str, typer.Option(help="Replication: linefs, serial (no pipeline), or host (no reserved cores).")
]


@group.command("serve")
def serve(
    host: Annotated[str, typer.Argument(help="Name of this replica.")],
    store: Annotated[str, typer.Option(help="Folder or URL where the hosts find each other.")],
    secret_file: Annotated[Path, typer.Option(metavar="FILE", help="File with the secret of all hosts.")],
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="HOST:PORT. The next two ports are used, too.")
    ],
    folder: Annotated[Path, typer.Option(help="Folder of the event log and the files.")] = Path("files"),
    name: Name = "files",
    domain: Annotated[str, typer.Option(help="Failure domain of this host, such as its rack.")] = "",
    copies: Annotated[int, typer.Option(min=1, help="Replicas of the files.")] = 3,
    least: Annotated[int, typer.Option(min=1, help="Fewest replicas for an fsync to return.")] = 2,
    mode: ModeOption = "linefs",
    cores: Annotated[str, typer.Option(help="CPU cores reserved for replication, such as 6,7.")] = "",
    log_size: Annotated[str, typer.Option(help="Size of the write-ahead log.")] = "64 MiB",
) -> None:
    """Run a replica of the files until interrupted. A restarted replica copies what it lacks.

    Example: windtunnel files serve a --store /shared/files --secret-file secret --listen 10.0.0.1:7000
    """
    from windtunnel.base import ranges
    from windtunnel.base.keys import Keys
    from windtunnel.data.files.live.host import serve as run
    from windtunnel.data.files.model import LEAST_RING, MODES, FilesHostSpec

    Keys.read(secret_file, "--secret-file")
    address, _, port = listen.rpartition(":")
    if not address or not port.isdigit():
        raise UserError(f"--listen {listen!r} is no address; accepted is such as 10.0.0.1:7000")
    ring = int(quantity("log_size", log_size, "bytes")) // 4096 * 4096
    try:
        set_aside = ranges.read(cores)
    except ValueError:
        raise UserError(f"--cores {cores!r}: accepted are numbers of cores, such as 6,7") from None
    spec = FilesHostSpec(
        host, str(folder.absolute()), store, str(secret_file.absolute()), domain, listen,
        choice("mode", mode, MODES), copies, least, max(LEAST_RING, ring), set_aside,
    )  # fmt: skip
    run(spec, name)


@group.command("status")
def status(name: Name = "demo", as_json: Json = False) -> None:
    """Show the replicas, and the last operation of each. Exit status 3: fewer replicas than requested.

    Example: windtunnel files status --name files
    """
    from windtunnel.data.files.live.client import connect
    from windtunnel.data.files.model import Status

    files = connect(name)
    rows = files.status()
    files.close()
    emit(as_json, rows, (row if isinstance(row, str) else _line(row) for row in rows))
    holders = [row for row in rows if isinstance(row, Status)]
    if not holders or len(holders) < holders[0].copies:
        needed = holders[0].copies if holders else "those asked for"
        raise LessError(f"files: {len(holders)} hosts of {needed}")


def _line(row: Status) -> str:
    role = "primary" if row.leads else "follows"
    stalled = f", stalled: {row.stalled}" if row.stalled else ""
    return (
        f"{row.name}: {role}, epoch {row.epoch}, {row.written - 1:,} operations written,"
        f" {row.published.sequence - 1:,} published{stalled}"
    )


@group.command("mount")
def mount(
    folder: Annotated[Path, typer.Argument(help="Target folder. It is created if missing.")],
    name: Name = "demo",
) -> None:
    """Mount the files in a folder by FUSE, until it is unmounted (fusermount3 -u FOLDER).

    Example: windtunnel files mount /mnt/files --name files
    """
    from windtunnel.data.files.live.client import connect
    from windtunnel.data.files.live.mount import mount as run

    run(connect(name), folder)


@group.command("fsck")
def fsck(
    folders: Annotated[list[Path], typer.Argument(help="Folders of hosts that have ended.")],
    as_json: Json = False,
) -> None:
    """Check the replicas' disks, and compare them. Exit status 3: damaged, or different.

    Example: windtunnel files fsck /data/a /data/b
    """
    from windtunnel.data.files.check import check

    hosts = {str(folder): check(folder) for folder in folders}
    alike = len({frozenset(host.digests.items()) for host in hosts.values()}) <= 1
    rows: dict[str, dict[str, Any]] = {
        name: {"files": len(host.digests), "operations": host.position.sequence - 1, "logged": host.logged,
               "damage": host.damage}
        for name, host in hosts.items()
    }  # fmt: skip
    lines = [
        line
        for name, row in rows.items()
        for line in (
            f"{name}: {row['files']:,} files and folders after {row['operations']:,} operations,"
            f" {row['logged']:,} of them only in the log",
            *(f"  {damage}" for damage in row["damage"]),
        )
    ]
    emit(as_json, {"hosts": rows, "alike": alike}, lines)
    damaged = [name for name, host in hosts.items() if host.damage]
    if damaged or not alike:
        raise LessError(f"files: {', '.join(damaged)} damaged" if damaged else "files: the hosts differ")


@group.command("demo")
def demo(
    replicas: Annotated[int, typer.Option(min=1, max=16, help="Number of replicas on this machine.")] = 3,
    kill: Annotated[str, typer.Option(metavar="primary|N", help="Kill this host of the chain.")] = "",
    freeze: Annotated[int, typer.Option(metavar="N", min=0, help="Pause this host for 10 s.")] = 0,
    mode: ModeOption = "linefs",
    as_json: Json = False,
) -> None:
    """Start replicas, write and fsync, fail one of them, and compare their contents.

    Example: windtunnel files demo --replicas 3 --kill primary
    """
    from windtunnel.data.files.live.demo import demo as run
    from windtunnel.data.files.model import MODES

    if kill and freeze:
        raise UserError("files: --kill and --freeze are given; accepted is one of them")
    if kill and kill != "primary" and not kill.isdigit():
        raise UserError(f"files: --kill {kill!r} is no host; accepted are primary and 1 to {replicas}")
    report = run(replicas, kill=kill, freeze=freeze, mode=choice("mode", mode, MODES))
    emit(as_json, report, [_report(report)])
    if report["lost_bytes"] or not report["equal"] or report["damage"]:
        raise LessError(f"files: {report['lost_bytes']} bytes lost, hosts equal: {report['equal']}")


def _report(report: dict[str, Any]) -> str:
    fault = report["fault"]
    struck = (
        f"{fault['host']} was {'killed' if fault['kind'] == 'kill' else 'stopped for 10 s'}; "
        if fault
        else ""
    )
    return (
        f"{report['writes']:,} writes of 16 KiB, each with its fsync on {report['replicas']} hosts"
        f" ({report['mode']}); {struck}{report['copies']} hold the files now\n"
        f"lost: {report['lost_bytes']} bytes; fsync: median {report['fsync_p50_s'] * 1e3:.1f} ms, longest"
        f" {report['fsync_longest_s']:.2f} s; hosts equal: {'yes' if report['equal'] else 'no'}"
    )
