"""``windtunnel serve``: a model over HTTP, scheduled by a policy; or a trace through the same policy in the
twin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli.common import Json, print_json, print_table
from windtunnel.cli.options import takes
from windtunnel.serving.engine.settings import ServeSettings

if TYPE_CHECKING:
    from windtunnel.serving.engine.emulation import Emulated

DEFAULT = ServeSettings()


@takes(ServeSettings)
def serve(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A model's directory, or a config.json (random weights)."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="A model built at random, such as tiny-hybrid.")
    ] = None,
    options: ServeSettings = DEFAULT,
    engine: Annotated[
        str, typer.Option(help="own: Transformers' models; vllm: vLLM's server, scheduled by the policies.")
    ] = "own",
    vllm: Annotated[
        str, typer.Option(metavar="WORDS", help="With --engine vllm: further words of 'vllm serve'.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Serve a model over OpenAI's HTTP API until it is interrupted.

    With --trace a trace of requests is emulated instead, --on a cluster, with a model --model-like one that
    is published, or by a --step-time.

    Example: windtunnel serve --config tiny-hybrid --port 8811
    """
    from windtunnel.base.errors import UserError

    if options.trace is not None:
        if model is not None or config is not None:
            raise UserError("serve: --trace is emulated, DIR and --config are served; one is accepted")
        _emulate(options, as_json)
        return

    def ready(url: str, number: str) -> None:
        called = options.name or Path(str(model or config)).name
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
        policies = VllmSettings(
            options.branching, options.admission, options.ttft, options.tpot, options.step_time,
            options.rules, every=options.every,
        )  # fmt: skip
        serve_vllm(Server(str(model), options.name, options.host, options.port, vllm), policies, ready)
        return
    if vllm:
        raise UserError("serve: --vllm is for --engine vllm")
    if (model is None) == (config is None):
        raise UserError("serve: one of DIR and --config is needed, or a --trace")
    from windtunnel.serving.engine.live import serving

    with serving():
        from windtunnel.serving.engine.live.serve import serve as run

        run(replace(options, model=str(model or config)), ready)


def _emulate(settings: ServeSettings, as_json: bool) -> None:
    from windtunnel.serving.engine.emulation import emulate

    emulated = emulate(settings)
    if as_json:
        print_json({"run": emulated.run, **emulated.summary, "about": emulated.about})
    else:
        _print(emulated)


def _print(emulated: Emulated) -> None:
    from windtunnel.base.units import seconds
    from windtunnel.serving.engine.twin.figures import PERCENTILES

    data, columns = emulated.summary, ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
    print_table(("setting", ""), emulated.about.items(), rules=False)
    rows = [
        (words, *(seconds(data[name][column]) for column in columns))
        for name, words in (
            ("ttft", "first token (TTFT)"), ("tpot", "each further token (TPOT)"), ("total", "end to end")
        )
    ]  # fmt: skip
    print_table(("emulated", *(f">{column}" for column in columns)), rows)
    facts = [
        ("requests", f"{data['requests']:,}: {data['finished']:,} finished, {data['refused']:,} refused"),
        ("got what was promised", f"{data['attainment']:.2%}"),
        ("goodput", f"{data['goodput']:.4g} requests/s that got it"),
        ("requests/s", f"{data['requests_per_second']:.4g}, and {data['tokens_per_second']:,.0f} tokens/s"),
        ("KV held", f"{data['kv_mean']:.1%}, at most {data['kv_peak']:.1%} of {data['kv_tokens']:,} tokens"),
        ("prompt tokens cached", f"{data['cached']:.2%}"),
        ("engine busy", f"{data['busy']:.1%} of {data['seconds']:,.0f} s, {data['steps']:,} steps"),
    ]
    if cost := data.get("cost"):
        words = f"{cost['total']:.4g} in all, {cost['per_million_tokens']:.4g} a million tokens"
        facts.append(("cost", f"{words}, {cost['per_thousand_met']:.4g} a thousand requests that got it"))
    never = sorted({words for part in emulated.parts for words in part.never.values()})[:3]
    facts += [("never served", words) for words in never]
    print_table(("figure", "emulated"), [*facts, ("run", emulated.run)], rules=False)
