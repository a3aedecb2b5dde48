"""Sandboxes as tools of the Model Context Protocol, on its official package ``mcp``.

An agent that speaks MCP makes sandboxes, runs commands, reads and writes files, and checkpoints, forks and
rolls back. Each command and each file that it writes is a turn, so what it needs is kept without its asking.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from windtunnel.agents.sandbox.client import Awaitable, Client
from windtunnel.agents.sandbox.model import CheckpointManifest, SandboxSpec
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.base.plain import to_plain

LONGEST = 64 * 2**10
"""Bytes of each output, and of a file, that a model is given."""
ABOUT = (
    "Sandboxes that can be checkpointed, forked and rolled back: files, processes and shells. A command "
    "runs in a persistent shell, so its directory and variables stay. What it changed is kept by itself."
)


def server(client: Client) -> MCPServer:
    """The tools, for the daemon of ``client``."""
    threads = ThreadPoolExecutor(64, thread_name_prefix="sandbox-mcp")
    host: Any = Awaitable(client, threads)
    served = MCPServer("windtunnel-sandbox", instructions=ABOUT)

    def tool(work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        """A tool whose errors are the sentences that they are."""

        @functools.wraps(work)
        async def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                return await work(*args, **kwargs)
            except (WindtunnelError, OSError) as error:
                raise ToolError(str(error)) from error

        served.tool()(answer)
        return work

    @tool
    async def sandboxes() -> list[dict[str, Any]]:
        """All sandboxes: name, status, newest checkpoint (tip), processes, and what else is known."""
        return [to_plain(info) for info in await host.boxes()]

    @tool
    async def create(name: str, image: str = "host", network: str = "off") -> str:
        """Make a sandbox and start it; returns its name."""
        sandbox = await host.create(SandboxSpec(name, image=image, network=network))
        return str(sandbox.name)

    @tool
    async def exec(sandbox: str, command: str, timeout: float = 600.0, shell: str = "main") -> dict[str, Any]:
        """Run a line in a persistent shell of a sandbox; the ends of its outputs, and how it ended."""
        box = await host.get(sandbox)
        result = await box.run(command, timeout=timeout, shell=shell)
        if result.ended != "sandbox-died":
            await box.end_turn()
        outputs = {name: _text(getattr(result, name)[-LONGEST:]) for name in ("stdout", "stderr")}
        return {**outputs, "exit_code": result.exit_code, "ended": result.ended, "note": result.note}

    @tool
    async def read_file(sandbox: str, path: str) -> str:
        """The text of a file of a sandbox."""
        data = await (await host.get(sandbox)).get(path)
        if len(data) > LONGEST:
            raise UserError(
                f"{path} has {len(data)} bytes, at most {LONGEST} are given; take a part by 'exec'"
            )
        return _text(data)

    @tool
    async def write_file(sandbox: str, path: str, text: str) -> None:
        """Write a file of a sandbox; folders on the way are made."""
        box = await host.get(sandbox)
        await box.put(path, text.encode())
        await box.end_turn()

    @tool
    async def list_files(sandbox: str, path: str = "/") -> list[str]:
        """The names in a folder of a sandbox; those of folders end with '/'."""
        entries = await (await host.get(sandbox)).listdir(path)
        return [entry.name + ("/" if entry.kind == "folder" else "") for entry in entries]

    @tool
    async def checkpoint(sandbox: str, label: str = "") -> dict[str, Any]:
        """Keep the state of a sandbox as it is now; its id is what 'fork' and 'rollback' take."""
        return _summary(await (await host.get(sandbox)).checkpoint(label))

    @tool
    async def checkpoints(sandbox: str) -> list[dict[str, Any]]:
        """The checkpoints of a sandbox, oldest first."""
        return [_summary(manifest) for manifest in (await (await host.get(sandbox)).log()).checkpoints]

    @tool
    async def fork(checkpoint: str, count: int = 1) -> list[str]:
        """Start sandboxes that go on from a checkpoint, or from a sandbox's state now; their names."""
        return [box.name for box in await host.fork(checkpoint, count)]

    @tool
    async def rollback(sandbox: str, checkpoint: str) -> str:
        """Bring a sandbox back to a checkpoint; what it brought back, in words."""
        report = await (await host.get(sandbox)).rollback(checkpoint)
        return f"turn {report.turn} is back: {', '.join(report.restored)}"

    return served


def serve(client: Client) -> None:
    """Serve the tools on standard input and output until they end."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server(client).run_stdio_async())


def _summary(manifest: CheckpointManifest) -> dict[str, Any]:
    return {
        "id": manifest.id, "turn": manifest.turn, "class": manifest.turn_class.word, "label": manifest.label,
        "lacks": [str(lack) for lack in manifest.lacks],
    }  # fmt: skip


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
