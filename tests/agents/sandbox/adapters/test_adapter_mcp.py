"""``windtunnel sandbox mcp`` as the client of the official package finds it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox.client import Client

mcp = pytest.importorskip("mcp", reason="needs the package mcp")
CLI = Path(__file__).parents[1] / "cli" / "fakecli.py"


def test_an_agent_works_with_the_tools(client: Client) -> None:
    words = [str(CLI), "sandbox", "--home", str(client.place.home), "mcp"]

    async def life() -> None:
        command = mcp.StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
        async with mcp.Client(command) as agent:

            async def use(tool: str, **given: Any) -> Any:
                result = await agent.call_tool(tool, given)
                assert not result.is_error, result.content
                content = result.structured_content
                return content["result"] if content and set(content) == {"result"} else content

            tools = {tool.name for tool in (await agent.list_tools()).tools}
            assert {"exec", "read_file", "write_file", "checkpoint", "fork", "rollback"} <= tools
            assert await use("create", name="m") == "m"
            await use("write_file", sandbox="m", path="/f", text="one ü\n")
            first = await use("checkpoint", sandbox="m", label="start")
            done = await use("exec", sandbox="m", command="cat f; echo two > f; echo e >&2; exit 3")
            assert (done["stdout"], done["stderr"], done["exit_code"]) == ("one ü\n", "e\n", 3)
            assert await use("read_file", sandbox="m", path="/f") == "two\n"
            assert await use("list_files", sandbox="m") == ["f"]
            assert "is back" in await use("rollback", sandbox="m", checkpoint=first["id"])
            assert await use("read_file", sandbox="m", path="/f") == "one ü\n"
            assert await use("fork", checkpoint=first["id"], count=2) == ["m-1", "m-2"]
            assert [checkpoint["label"] for checkpoint in await use("checkpoints", sandbox="m")] == ["start"]
            assert [sandbox["name"] for sandbox in await use("sandboxes")] == ["m", "m-1", "m-2"]
            wrong = await agent.call_tool("exec", {"sandbox": "nope", "command": "true"})
            assert wrong.is_error and "unknown" in wrong.content[0].text

    asyncio.run(asyncio.wait_for(life(), 300))
    assert len(client.get("m").log().turns) == 2
