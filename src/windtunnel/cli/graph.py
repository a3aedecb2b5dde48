"""``windtunnel graph show``: what the execution graphs of a run hold, read back from their files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from windtunnel.cli import Group

graph = typer.Typer(
    name="graph", cls=Group, help="Execution graphs in MLCommons Chakra's form.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(graph)


@graph.callback()
def _root() -> None:
    """Keeps ``show`` a verb of its own while it is the only one."""


@graph.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="RUN_ID|FILE|DIR", help="A run (or 'last'), an .et file, or a folder.")
    ],
    limit: Annotated[int, typer.Option(min=0, help="How many of the first nodes.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value instead of tables.")] = False,
) -> None:
    """Count the nodes and bytes of each graph, follow its longest chain, and list its first nodes.

    Example: windtunnel graph show last
    """
    from windtunnel.report.chakra import read_graph
    from windtunnel.report.graph_facts import facts

    console = Console()
    found = []
    for path in _files(what):
        nodes = read_graph(path)
        known = facts(path, nodes)
        first = _first(nodes, limit)
        if as_json:
            whole = asdict(known) | {"chain": [int(nodes.id[node]) for node in known.chain]}
            found.append({"file": str(path), "metadata": dict(nodes.metadata), **whole, "first": first})
        else:
            _print(console, path, nodes, known, first)
    if as_json:
        typer.echo(json.dumps({"graphs": found}, indent=2, ensure_ascii=False, default=repr))


def _files(what: str) -> list[Path]:
    """The graph files of a file, a folder, or the run with that id."""
    from windtunnel.base.errors import UserError
    from windtunnel.store.runs import Store

    path = Path(what)
    if path.is_file():
        return [path]
    if path.suffix == ".et":
        raise UserError(f"{what}: no such file, accepted is a run's id, an .et file or a folder of them")
    folder = path if path.is_dir() else Store.open().get(what).directory
    for place in (folder / "graph", folder):
        if files := sorted(place.glob("*.et")):
            return files
    raise UserError(f"{folder}: no graph there, accepted is a folder with .et files or with graph/*.et")


def _first(nodes: Any, limit: int) -> list[dict[str, Any]]:
    from windtunnel.report.chakra import NODE_TYPES
    from windtunnel.report.graph_facts import attributes, dependencies

    return [
        {
            "id": int(nodes.id[node]),
            "name": nodes.names[nodes.name[node]],
            "type": NODE_TYPES[nodes.type[node]],
            "duration_s": float(nodes.duration[node]),
            "dependencies": dependencies(nodes, node),
            "attributes": attributes(nodes, node),
        }
        for node in range(min(limit, len(nodes)))
    ]


def _print(console: Console, path: Path, nodes: Any, known: Any, first: list[dict[str, Any]]) -> None:
    from windtunnel.base import units

    width = min(console.width, 100)
    console.rule(f"[bold]{escape(path.stem)}[/]", align="left", style="dim", characters="─")
    if nodes.metadata:
        words = ", ".join(f"{name} {value}" for name, value in nodes.metadata.items())
        console.print(f"[dim]{escape(words)}[/]", width=width, highlight=False)
    types = ", ".join(f"{number:,} {name.removesuffix('_NODE')}" for name, number in known.types.items())
    absent = f" ({known.absent:,} of them on nodes that are not in the file)" if known.absent else ""
    console.print(
        f"{known.nodes:,} nodes ({types}), {known.dependencies:,} dependencies{absent}",
        highlight=False,
        width=width,
    )
    console.print(
        f"longest chain {known.depth:,} nodes; longest in time {units.seconds(known.chain_seconds)} over"
        f" {len(known.chain):,} nodes, of {units.seconds(known.busy_seconds)} in all nodes (emulated)",
        highlight=False,
        width=width,
    )
    if known.communication:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("collective")
        table.add_column("group", overflow="fold")
        for name in ("count", "bytes", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in known.communication:
            amount = (f"{row.count:,}", units.size(row.bytes), units.seconds(row.seconds))
            table.add_row(row.kind, escape(row.group), *amount)
        console.print(table, width=width)
    if first:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("node", justify="right")
        table.add_column("name", overflow="fold")
        table.add_column("type", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("after", overflow="fold")
        for node in first:
            after = ", ".join(map(str, node["dependencies"]))
            kind = node["type"].removesuffix("_NODE")
            table.add_row(
                str(node["id"]), escape(node["name"]), kind, units.seconds(node["duration_s"]), after
            )
        console.print(table, width=width)
        if known.nodes > len(first):
            console.print(f"[dim]… and {known.nodes - len(first):,} more (--limit)[/]")
    console.print()
