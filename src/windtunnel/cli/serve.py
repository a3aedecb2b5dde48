"""``windtunnel serve``: a model over HTTP, scheduled by a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("serve")(serve)


def serve(
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A model's directory, or a config.json (random weights)."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="A model built at random, such as tiny-hybrid.")
    ] = None,
    name: Annotated[str, typer.Option(help="What clients call it; its own name by default.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    policy: Annotated[str, typer.Option(help="Which extra branches take part in a step.")] = "taper",
    admission: Annotated[
        str, typer.Option(help="Requests whose first token is late: refuse, defer or wait.")
    ] = "refuse",
    max_rows: Annotated[int, typer.Option(min=1, help="Units that decode in one step.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens prefilled in one step.")] = 512,
    kv: Annotated[str, typer.Option(metavar="SIZE", help="For what running requests may hold.")] = "2GiB",
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get status 429.")] = 1024,
    prefix_cache: Annotated[
        str, typer.Option(metavar="RULES", help="What is kept of prompts; none: nothing.")
    ] = "three",
    prefix_kv: Annotated[str, typer.Option(metavar="SIZE", help="For what is kept.")] = "1GiB",
    ttft: Annotated[float | None, typer.Option(min=0, help="Seconds promised until the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(min=0, help="Seconds promised for each further one.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Of the worker; 0: as PyTorch takes.")] = 0,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    log: Annotated[
        int, typer.Option(min=0, metavar="N", help="Log the decisions of every Nth step; 0: none.")
    ] = 10,
) -> None:
    """Serve a model over OpenAI's HTTP API until it is interrupted.

    Example: windtunnel serve --config tiny-hybrid --port 8811
    """
    from windtunnel.base.errors import UserError
    from windtunnel.base.units import parse_quantity
    from windtunnel.serving.engine.live.serve import Served
    from windtunnel.serving.engine.live.serve import serve as run

    if (model is None) == (config is None):
        raise UserError("serve: one of --model and --config is needed")
    sizes = {"--kv": kv, "--prefix-kv": prefix_kv}
    bytes_of = {}
    for option, given in sizes.items():
        try:
            bytes_of[option] = int(parse_quantity(given, "bytes of memory"))
        except ValueError as error:
            raise UserError(f"serve: {option} {given!r}: {error}") from None
    served = Served(
        str(model or config), name, host, port, policy, admission, max_rows, chunk, bytes_of["--kv"], queue,
        "" if prefix_cache == "none" else prefix_cache, bytes_of["--prefix-kv"], device, threads, seed, log,
        ttft, tpot,
    )  # fmt: skip
    run(
        served,
        lambda url, number: typer.echo(
            f"Serving  {served.name or Path(served.model).name} at {url}/v1\nRun      {number}"
        ),
    )
