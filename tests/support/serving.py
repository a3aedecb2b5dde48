"""``windtunnel serve`` as a process of its own that has its imports before it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import preloaded
from windtunnel.store import eventlog

MODULES = (
    "torch",
    "transformers.models.bamba.modeling_bamba",
    "windtunnel.serving.engine.live.families",
    "windtunnel.serving.engine.live.prefixes",
    "windtunnel.serving.engine.live.serve",
    "windtunnel.cli.serve",
    "windtunnel.cli.main",
)


START = "from windtunnel.cli.main import main; main()"


@dataclass
class Served:
    """``url`` ends with /v1."""

    url: str
    run: str
    home: Path
    process: preloaded.Process

    @property
    def log(self) -> Path:
        return self.home / "runs" / self.run / eventlog.NAME

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + path, timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, **fields: Any) -> Any:
        """The answer to an OpenAI request."""
        body = json.dumps({"model": "tiny-hybrid", **fields}).encode()
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/{path}", body, kind)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())

    def facts(self) -> dict[str, float]:
        """What /metrics says, without labels."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        }

    def stop(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def served(home: Path, *words: str, model: tuple[str, ...] = ("--config", "tiny-hybrid")) -> Iterator[Served]:
    """``windtunnel serve`` of ``model`` with ``words``, its home at ``home``."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WINDTUNNEL_HOME": str(home)}
    command = ["-c", START, "serve", *model, "--port", "0", *words]
    process = preloaded.Process(command, modules=MODULES, env=env, stdout=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline().split() for _ in range(2)]
        assert [line[:1] for line in lines] == [["Serving"], ["Run"]], f"status {process.wait(60)}"
        yield Served(lines[0][-1], lines[1][-1], home, process)
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
