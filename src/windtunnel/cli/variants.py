"""``windtunnel variants``: variants of one model, and requests that say what they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Host, Port

if TYPE_CHECKING:
    from windtunnel.serving.variants.model import Variant

group = new_group("Serve model variants chosen by accuracy and latency (INFaaS).")
Home = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the registry of variants.")]
HERE = Path("variants")


@group.command("add")
def add(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An ONNX file, or a module saved by torch.save.")
    ],
    data: Annotated[Path, typer.Option(metavar="FILE", help="An .npz with each input and labels.")],
    task: Annotated[str, typer.Option(help="Task of the model, such as digits.")],
    architecture: Annotated[str, typer.Option("--name", help="Name of the model within its task.")],
    home: Home = HERE,
    compile: Annotated[bool, typer.Option(help="Compile torch modules, too.")] = True,
) -> None:
    """Build variants of a model, compare their outputs with it, and measure them.

    Example: windtunnel variants add small.pt --data digits.npz --task digits --name small
    """
    from windtunnel.serving.variants.live.registry import add as register

    entries, left_out = register(model, data, home, task=task, architecture=architecture, compiled=compile)
    _show([entry.variant for entry in entries])
    for words in left_out:
        typer.echo(f"Left out  {words}")


@group.command("list")
def listed(home: Home = HERE) -> None:
    """Show the variants that are registered.

    Example: windtunnel variants list
    """
    from windtunnel.serving.variants.live.registry import registered

    variants = [entry.variant for entry in registered(home)]
    if not variants:
        return typer.echo(f"No variants in {home} yet: start with `windtunnel variants add`.")
    _show(variants)


@group.command("serve")
def serve(
    home: Home = HERE,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the gRPC server; 0: a free port.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy of dispatching and loading.")] = "cheapest",
    on: Annotated[str, typer.Option(metavar="ENGINE", help="Run replicas on ray or ray://HOST:PORT.")] = "",
) -> None:
    """Answer requests over the Open Inference Protocol until interrupted.

    Example: windtunnel variants serve --port 8812 --grpc-port 8813
    """
    from windtunnel.serving.variants.live.serve import serve as run

    def ready(number: str, http: str, rpc: str) -> None:
        typer.echo(f"Serving  {http}/v2{f' and grpc {rpc}' if rpc else ''}\nRun      {number}")

    run(home, host, port, grpc_port, policy, on, ready)


def _show(variants: Sequence[Variant]) -> None:
    from rich.console import Console

    from windtunnel.serving.variants.report import table

    Console().print(table(variants))
