"""The asynchronous client against a real daemon."""

from __future__ import annotations

import asyncio

import pytest

from support.waiting import gone, until
from windtunnel.agents.sandbox.client import Client, connect_async
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.model import Event, SandboxSpec
from windtunnel.base.errors import UserError


def test_the_whole_life_of_a_sandbox(client: Client) -> None:
    async def life() -> None:
        async with await connect_async(client.place.home, start=False) as host:
            box = await host.create(SandboxSpec("a", environment={"A": "1"}))
            pieces: list[bytes] = []
            result = await box.run("echo $A; exit 4", on_output=lambda stream, data: pieces.append(data))
            assert (result.stdout, result.exit_code, pieces) == (b"1\n", 4, [b"1\n"])
            await box.put("/f", b"\0\xff")
            assert await box.get("/f") == b"\0\xff"
            assert [one.name for one in await box.listdir("/")] == ["f"]
            made = await box.checkpoint("x", pin=True)
            await box.put("/f", b"new")
            assert (await box.rollback(made.id)).checkpoint == made.id
            assert (await box.restore()).checkpoint == made.id
            assert await box.get("/f") == b"\0\xff"
            async with box.turn("r"):
                await box.run("touch hold")
            pending = await box.end_turn("r2")
            assert not await pending.done()
            with pytest.raises(TimeoutError):
                await pending.wait(0.05)
            await pending.promote()
            assert (await pending.wait(60)).request == "r2"
            await box.wait()
            assert [one.request for one in (await box.log()).turns] == ["r", "r2"]
            assert (await box.diff(made.id)).started == ("new",)
            assert await box.shells() == ["main"]
            assert (await box.spec()).environment == {"A": "1"}
            (fork,) = await host.fork(made.id, names=["b"])
            assert (await fork.info()).base == made.id
            assert set(await host.notice(9)) == {"a", "b"}
            assert (await host.gc()).bytes_freed == 4096
            assert (await host.export("a", "/x")).box == "a"
            assert (await host.import_("/x", "c")).name == "c"
            assert (await host.health()).home == str(client.place.home)
            assert (await host.doctor())[0].name == "root"
            await box.stop()
            with pytest.raises(SandboxError, match="dead"):
                await box.run("true")
            await box.remove()
            with pytest.raises(UserError, match="unknown"):
                await host.get("a")
            assert [one.name for one in await host.boxes()] == ["b", "c"]

    asyncio.run(life())


def test_cancelling_the_task_cancels_the_command(client: Client) -> None:
    async def life() -> int:
        async with await connect_async(client.place.home, start=False) as host:
            box = await host.create(SandboxSpec("a"))
            begun = asyncio.Event()
            run = asyncio.create_task(
                box.run("echo $$ > pid; echo begun; sleep 600", on_output=lambda *_: begun.set())
            )
            await asyncio.wait_for(begun.wait(), 20)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert (await box.run("echo free", timeout=60)).stdout == b"free\n"
            return int(await box.get("/pid"))

    pid = asyncio.run(life())
    until(lambda: gone(pid))


def test_many_commands_at_once(client: Client) -> None:
    async def life() -> None:
        async with await connect_async(client.place.home, start=False) as host:
            boxes = [await host.create(SandboxSpec(f"b{n}")) for n in range(8)]
            results = await asyncio.gather(*(box.run(f"echo {n}; seq 1000") for n, box in enumerate(boxes)))
            assert [result.stdout.split()[0] for result in results] == [str(n).encode() for n in range(8)]

    asyncio.run(life())


def test_events_are_heard(client: Client) -> None:
    async def life() -> Event:
        async with await connect_async(client.place.home, start=False) as host:

            async def make() -> None:
                for number in range(1000):
                    await host.create(SandboxSpec(f"b{number}"))

            making = asyncio.create_task(make())
            try:
                async for event in host.events():
                    return event
            finally:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
        raise AssertionError("no event came")

    event = asyncio.run(life())
    assert event.kind == "created"
