"""``windtunnel serve``: a model over HTTP, scheduled by a policy; or a trace through the same policy in the
twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli.common import Host, Json, Port, print_json


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A model's directory, or a config.json (random weights)."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="A model built at random, such as tiny-hybrid.")
    ] = None,
    name: Annotated[str, typer.Option(help="Model name for clients. Default: the model's own name.")] = "",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    branching: Annotated[
        str,
        typer.Option("--policy", help="Policy for extra branches in a step: a name, or your own FILE.py."),
    ] = "taper",
    admission: Annotated[
        str, typer.Option(help="What to do with requests that will miss --ttft: refuse or wait.")
    ] = "refuse",
    max_rows: Annotated[int, typer.Option(min=1, help="Most sequences in a decode batch.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens prefilled in one step.")] = 512,
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="KV cache for running requests. Default: 2GiB; emulated: what fits."
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=1, help="Most waiting requests. Further ones get status 429.")
    ] = 1024,
    rules: Annotated[
        str | None,
        typer.Option("--prefix-cache", metavar="RULES", help="Prefix cache of prompts: density, or none."),
    ] = None,
    prefix_bytes: Annotated[
        str | None,
        typer.Option(
            "--prefix-kv",
            metavar="SIZE",
            help="Size of the prefix cache. Default: 1GiB; emulated: half of --kv.",
        ),
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(min=0, help="Objective: seconds until the first token (TTFT).")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(min=0, help="Objective: seconds per further output token (TPOT).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of the engine; 0: one for each idle core.")
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of weights and caches: auto (the model's), float32, bfloat16 or float16."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    log: Annotated[
        int, typer.Option(min=0, metavar="N", help="Log the decisions of every Nth step; 0: none.")
    ] = 10,
    engine: Annotated[
        str, typer.Option(help="own: Transformers' models; vllm: vLLM's server, scheduled by the policies.")
    ] = "own",
    vllm: Annotated[
        str, typer.Option(metavar="WORDS", help="With --engine vllm: further words of 'vllm serve'.")
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Emulate the requests of a trace file: Azure, BurstGPT, Mooncake, Vidur …"
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="CLUSTER", help="Emulated cluster, such as h100-sxm:1x2. Each host is a replica."
        ),
    ] = "",
    model_like: Annotated[
        str, typer.Option(metavar="NAME", help="Emulated: such as qwen3-32b, or a config.json.")
    ] = "",
    step_time: Annotated[
        str,
        typer.Option(metavar="SPEC", help="Emulated step times: calibrated, a profile, or base=…,row=…."),
    ] = "",
    speed_up: Annotated[float, typer.Option(help="Emulated: how much faster requests arrive.")] = 1.0,
    requests: Annotated[
        int,
        typer.Option(min=0, help="Number of emulated requests; the trace repeats. 0: the trace as it is."),
    ] = 0,
    branches: Annotated[
        str, typer.Option(metavar="SPEC", help="Emulated: synthetic, as share=0.6,count=3-10,tokens=90.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Serve a model over OpenAI's HTTP API until it is interrupted.

    With --trace a trace of requests is emulated instead, --on a cluster, with a model --model-like one that
    is published, or by a --step-time.

    Example: windtunnel serve --config tiny-hybrid --port 8811
    """
    from windtunnel.base.errors import UserError
    from windtunnel.base.units import parse_quantity

    sizes = {"--kv": kv, "--prefix-kv": prefix_bytes}
    bytes_of = {}
    for option, quantity in sizes.items():
        try:
            bytes_of[option] = int(parse_quantity(quantity, "bytes of memory")) if quantity else 0
        except ValueError as error:
            raise UserError(f"serve: {option} {quantity!r}: {error}") from None
    rule_set = "" if rules == "none" else rules or "density"
    if trace is not None:
        if model is not None or config is not None:
            raise UserError("serve: --trace is emulated, DIR and --config are served; one is accepted")
        _emulate(
            as_json, trace=trace, on=on, model_like=model_like, step_time=step_time, speed_up=speed_up,
            count=requests, branches=branches, branching=branching, admission=admission, rows=max_rows,
            chunk=chunk, kv=bytes_of["--kv"], queue=queue, rules=rule_set,
            prefix_bytes=bytes_of["--prefix-kv"], ttft=ttft, tpot=tpot, seed=seed, every=log,
        )  # fmt: skip
        return

    def ready(url: str, number: str) -> None:
        called = name or Path(str(model or config)).name
        text = json.dumps({"url": f"{url}/v1", "model": called, "run": number})
        typer.echo(text if as_json else f"Serving  {called} at {url}/v1\nRun      {number}")

    if engine not in ("own", "vllm"):
        raise UserError(f"serve: --engine {engine!r} is unknown; accepted are own, vllm")
    if engine == "vllm":
        from windtunnel.serving.vllm.serve import Server
        from windtunnel.serving.vllm.serve import serve as serve_vllm
        from windtunnel.serving.vllm.settings import VllmSettings

        if model is None:
            raise UserError("serve: --engine vllm needs DIR, a model's directory or a name that vLLM knows")
        policies = VllmSettings(branching, admission, ttft, tpot, step_time, rules or "", every=log)
        serve_vllm(Server(str(model), name, host, port, vllm), policies, ready)
        return
    if vllm:
        raise UserError("serve: --vllm is for --engine vllm")
    if (model is None) == (config is None):
        raise UserError("serve: one of DIR and --config is needed, or a --trace")
    from windtunnel.serving.engine.live import process

    with process.serving():
        from windtunnel.serving.engine.live.serve import ServeSettings
        from windtunnel.serving.engine.live.serve import serve as run

        settings = ServeSettings(
            str(model or config), name=name, host=host, port=port, branching=branching, admission=admission,
            rows=max_rows, chunk=chunk, kv=bytes_of["--kv"] or 2 << 30, queue=queue, rules=rule_set,
            prefix_bytes=bytes_of["--prefix-kv"] or 1 << 30, device=device, threads=threads, dtype=dtype,
            seed=seed, every=log, ttft=ttft, tpot=tpot,
        )  # fmt: skip
        run(settings, ready)


def _emulate(as_json: bool, **options: Any) -> None:
    from windtunnel.serving import simulate
    from windtunnel.serving.engine import report

    emulated = simulate(**options)
    if as_json:
        print_json({"run": emulated.run, **emulated.summary, "about": emulated.about})
        return
    from rich.console import Console

    report.show(emulated, Console())
