"""``windtunnel graph show``: what the execution graphs of a run hold, read back from their files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, print_table

group = new_group("Execution graphs in the MLCommons Chakra format.")


@group.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="RUN_ID|FILE|DIR", help="A run (or 'last'), an .et file, or a folder.")
    ],
    limit: Annotated[int, typer.Option(min=0, help="Number of nodes to list.")] = 12,
    as_json: Json = False,
) -> None:
    """Count the nodes and bytes of each graph, follow its longest chain, and list its first nodes.

    Example: windtunnel graph show last
    """
    from windtunnel.report.chakra import read_graph
    from windtunnel.report.graph_facts import facts

    graphs = []
    for path in _files(what):
        nodes = read_graph(path)
        graph = facts(path, nodes)
        first = _first(nodes, limit)
        if as_json:
            whole = asdict(graph) | {"chain": [int(nodes.id[node]) for node in graph.chain]}
            graphs.append({"file": str(path), "metadata": dict(nodes.metadata), **whole, "first": first})
        else:
            _print(path, nodes, graph, first)
    if as_json:
        typer.echo(json.dumps({"graphs": graphs}, indent=2, ensure_ascii=False, default=repr))


def _files(what: str) -> list[Path]:
    """The graph files of a file, a folder, or the run with that id."""
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


def _print(path: Path, nodes: Any, graph: Any, first: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from windtunnel.base.units import seconds, size

    console = Console(highlight=False)
    width = min(console.width, 100)
    console.rule(f"[bold]{escape(path.stem)}[/]", align="left", style="dim", characters="─")
    if nodes.metadata:
        words = ", ".join(f"{name} {value}" for name, value in nodes.metadata.items())
        console.print(f"[dim]{escape(words)}[/]", width=width)
    types = ", ".join(f"{number:,} {name.removesuffix('_NODE')}" for name, number in graph.types.items())
    absent = f" ({graph.absent:,} of them on nodes that are not in the file)" if graph.absent else ""
    console.print(
        f"{graph.nodes:,} nodes ({types}), {graph.dependencies:,} dependencies{absent}\n"
        f"longest chain {graph.depth:,} nodes; longest in time {seconds(graph.chain_seconds)} over"
        f" {len(graph.chain):,} nodes, of {seconds(graph.busy_seconds)} in all nodes (emulated)",
        width=width,
    )
    if graph.communication:
        rows = [
            (row.kind, row.group, f"{row.count:,}", size(row.bytes), seconds(row.seconds))
            for row in graph.communication
        ]
        print_table(("collective", "group", ">count", ">bytes", ">time"), rows, rules=False)
    if first:
        rows = [
            (
                str(node["id"]), node["name"], node["type"].removesuffix("_NODE"),
                seconds(node["duration_s"]), ", ".join(map(str, node["dependencies"])),
            )
            for node in first
        ]  # fmt: skip
        more = graph.nodes - len(first)
        note = f"… and {more:,} more (--limit)" if more > 0 else ""
        print_table((">node", "name", "type", ">time", "after"), rows, note=note, rules=False)
    console.print()
