"""``windtunnel serve --engine vllm``: vLLM's server with the policies' scheduler, and a run with its log."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from windtunnel.base.errors import HostError, UserError
from windtunnel.serving.engine.policies import choose_policies
from windtunnel.serving.vllm.settings import VllmSettings
from windtunnel.store import eventlog
from windtunnel.store.runs import Store

CAPABILITY = "serving.vllm"
SCHEDULER = "windtunnel.serving.vllm.Scheduler"
MIDDLEWARE = "windtunnel.serving.vllm.Refusals"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
LOOK = 0.25
"""Seconds between two looks at a server that starts."""
STARTS, STOPS = 900.0, 30.0
"""Seconds within which it answers, and within which it ends when it is told to."""


@dataclass(frozen=True, slots=True)
class Server:
    """``model``: a directory or a name that vLLM knows; ``name``: what clients call it; ``more``: further
    words of ``vllm serve``. ``scheduler``: False for vLLM's own."""

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    more: str = ""
    scheduler: bool = True

    def command(self, settings: VllmSettings) -> list[str]:
        """What starts it."""
        folder = Path(self.model)
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        words += [
            "--served-model-name",
            self.name or folder.name,
            "--host",
            self.host,
            "--port",
            str(self.port),
        ]
        if folder.is_dir() and not any((folder / file).exists() for file in TOKENIZERS):
            words.append("--skip-tokenizer-init")  # prompts are token ids
        if self.scheduler:
            words += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
            words += ["--additional-config", json.dumps(settings.additional())]
        return words + shlex.split(self.more)


def serve(server: Server, settings: VllmSettings, ready: Callable[[str, str], None]) -> None:
    """Until SIGTERM or SIGINT. ``ready`` gets the address and the run once requests are answered.

    Raises:
        UserError: the policy is unknown, vLLM is not installed, or nobody may listen there.
        HostError: vLLM ended by itself.
    """
    choose_policies(settings.policy, settings.admission)
    if settings.policy.endswith(".py"):
        settings = replace(settings, policy=str(Path(settings.policy).absolute()))
    if find_spec("vllm") is None:
        raise UserError("serve: --engine vllm needs vLLM: pip install 'windtunnel[vllm]'")
    server = replace(server, port=find_port(server.host, server.port))
    inputs = {"command": "serve", "model": server.model, "more": server.more, **settings.additional()}
    run = Store.open().begin(CAPABILITY, inputs, 0)
    with run.failing():
        settings = replace(settings, events=str(run.directory / eventlog.NAME))
        with server_process(server.command(settings)) as process:
            wait_until_ready(process, f"http://{server.host}:{server.port}")
            ready(f"http://{server.host}:{server.port}", run.id)
            process.wait()
        if process.returncode not in (0, -signal.SIGTERM, -signal.SIGINT):
            raise HostError(f"serve: vLLM ended with status {process.returncode}")
        run.finish({})


@contextmanager
def server_process(command: Sequence[str], output: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM's server, which is stopped at the end. SIGTERM and SIGINT go on to it meanwhile."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output or sys.stderr, stderr=output)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOPS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Returns when the server answers.

    Raises:
        HostError: it ended, or did not answer in time.
    """
    until = time.monotonic() + STARTS
    while time.monotonic() < until:
        try:
            process.wait(LOOK)
        except subprocess.TimeoutExpired:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                continue
        else:
            raise HostError(f"serve: vLLM ended with status {process.returncode} before it answered")
    raise HostError(f"serve: vLLM did not answer within {STARTS:g} s")


def find_port(host: str, port: int) -> int:
    """The port, or a free one for 0."""
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        except OSError as error:
            raise UserError(f"serve: `port` {port} on {host} cannot be used ({error.strerror})") from None
        return int(sock.getsockname()[1])
