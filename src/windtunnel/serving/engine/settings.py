"""What ``windtunnel serve`` is asked for, declared once: the command line's options are made from it.

The same settings serve a model (`live.serve`) and emulate a trace (`emulation`). Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.base.options import option, options
from windtunnel.base.units import parse_quantity

NO_CACHE = "none"
"""As ``rules``: no prefix cache."""


def _read_size(text: str) -> int:
    return int(parse_quantity(text, "bytes of memory")) if text else 0


@dataclass(frozen=True)
class ServeSettings:
    """``model``: a directory, a ``config.json`` or a name of `live.families`; ``kv`` and ``prefix_bytes``:
    bytes, 0 for the default; ``rules``: of the prefix cache, "" for the default; ``every``: of so many steps
    the decisions of one are logged; ``trace``: a file of `traces.requests`, which is emulated. Where it is,
    ``on`` and ``model_like`` are a cluster and a model of `twin.models`, or there is a ``step_time``."""

    model: str = ""
    name: str = option("", "Model name for clients. Default: the model's own name.")
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0: a free port.", least=0, most=65535)
    branching: str = option(
        "taper", "Policy for extra branches in a step: a name, or your own FILE.py.", flags=("--policy",)
    )
    admission: str = option("refuse", "What to do with requests that will miss --ttft: refuse or wait.")
    rows: int = option(64, "Most sequences in a decode batch.", least=1, flags=("--max-rows",))
    chunk: int = option(512, "Tokens prefilled in one step.", least=1)
    kv: int = option(
        "", "KV cache for running requests. Default: 2GiB; emulated: what fits.", kind=str, metavar="SIZE",
        read=_read_size,
    )  # fmt: skip
    queue: int = option(1024, "Most waiting requests. Further ones get status 429.", least=1)
    rules: str = option(
        "", "Prefix cache of prompts: density (default), or none.", metavar="RULES",
        flags=("--prefix-cache",),
    )  # fmt: skip
    prefix_bytes: int = option(
        "", "Size of the prefix cache. Default: 1GiB; emulated: half of --kv.", kind=str, metavar="SIZE",
        flags=("--prefix-kv",), read=_read_size,
    )  # fmt: skip
    ttft: float | None = option(None, "Objective: seconds until the first token (TTFT).", least=0)
    tpot: float | None = option(None, "Objective: seconds per further output token (TPOT).", least=0)
    device: str = option("cpu", "cpu or cuda.")
    threads: int = option(0, "Threads of the engine; 0: one for each idle core.", least=0)
    dtype: str = option(
        "auto", "Data type of weights and caches: auto (the model's), float32, bfloat16 or float16."
    )
    seed: int = option(0, "Seed of random weights.")
    every: int = option(
        10, "Log the decisions of every Nth step; 0: none.", least=0, metavar="N", flags=("--log",)
    )
    trace: Path | None = option(  # noqa: RUF009
        None, "Emulate the requests of a trace file: Azure, BurstGPT, Mooncake, Vidur …", metavar="FILE"
    )
    on: str = option("", "Emulated cluster, such as h100-sxm:1x2. Each host is a replica.", metavar="CLUSTER")
    model_like: str = option("", "Emulated: such as qwen3-32b, or a config.json.", metavar="NAME")
    step_time: str = option(
        "", "Emulated step times: calibrated, a profile, or base=…,row=….", metavar="SPEC"
    )
    speed_up: float = option(1.0, "Emulated: how much faster requests arrive.")
    branches: str = option("", "Emulated: synthetic, as share=0.6,count=3-10,tokens=90.", metavar="SPEC")

    def __post_init__(self) -> None:
        for each in options(ServeSettings):
            value = getattr(self, each.name)
            if each.least is not None and value is not None and not value >= each.least:
                raise UserError(f"serve: `{each.name}` {value:g} is not accepted; use {each.least:g} or more")

    @property
    def cache_rules(self) -> str:
        """The rules of the prefix cache by name; "" for none."""
        return "" if self.rules == NO_CACHE else self.rules or "density"
