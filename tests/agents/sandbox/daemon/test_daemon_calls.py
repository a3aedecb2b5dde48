"""Sandboxes through a real daemon: what is called here happens there, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from agents.sandbox.daemon.daemons import pid_of
from support.waiting import gone, until
from windtunnel.agents.sandbox import Sandbox, connect_async
from windtunnel.agents.sandbox.client import Client, get_path
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import FolderEntry, SandboxLimits, SandboxSpec, TurnClass
from windtunnel.base.errors import HostError, UserError
from windtunnel.linux import processes


def test_a_spec_and_a_checkpoint_travel_whole(client: Client) -> None:
    spec = SandboxSpec(
        name="a", image="x", network="proxy",
        limits=SandboxLimits(memory=None, cpus=1.5, pids=9, disk=1 << 30),
        environment={"A": "ü b"}, workdir="/w", hostname="h", services={"web": "serve &"},
        proxy_upstream="http://model",
    )  # fmt: skip
    box = client.create(spec)
    assert box.spec == spec
    box.run("echo one > file")
    manifest = box.checkpoint("first", full=True, pin=True)
    assert (manifest.label, manifest.turn_class, manifest.pinned, manifest.spec) == (
        "first",
        TurnClass.FULL,
        True,
        spec,
    )
    assert box.log().checkpoints == (manifest,) and box.tip == manifest.id
    box.run("echo two > file")
    assert box.restore().restored == ("files",) and box.get("/file") == b"one\n"
    assert box.diff(manifest.id).files[0].path == "/a"
    forks = client.fork(manifest.id, 2, name="x")
    assert [fork.get("/file") for fork in forks] == [b"one\n", b"one\n"]
    assert client.get("x-1").info().base == manifest.id and set(client.notice(30)) == {"a", "x-1", "x-2"}
    assert client.gc(dry_run=True).bytes_freed == 0 and client.gc().bytes_freed == 4096
    assert client.export("a", "/tmp/x").box == "a"
    assert client.import_("/tmp/x", "z").info().image == "/tmp/x"


def test_output_is_exact_whatever_its_bytes_are(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    pieces: list[tuple[str, bytes]] = []
    command = r"printf 'ok\n\0\xff\xe2\x80\xa8\r\n'; printf 'e\xc3' >&2; exit 7"
    result = box.run(command, on_output=lambda stream, data: pieces.append((stream, data)))
    assert (result.stdout, result.stderr) == (b"ok\n\0\xff\xe2\x80\xa8\r\n", b"e\xc3")
    assert (result.exit_code, result.ended) == (7, "exit")
    assert b"".join(data for stream, data in pieces if stream == "stdout") == result.stdout
    large = box.run("head -c 5000000 /dev/urandom | tee copy; seq 300000 >&2")
    assert len(large.stdout) == 5_000_000 and large.stdout == box.get("/copy")
    assert large.stderr == "".join(f"{n}\n" for n in range(1, 300001)).encode()
    assert box.run(["echo", "two words"]).stdout == b"two words\n"


def test_sandboxes_run_side_by_side(client: Client) -> None:
    """Every sandbox waits for a file that the next one makes: one after the other they would never end."""
    count, shared = 6, client.place.home
    boxes = [client.create(SandboxSpec(f"b{n}")) for n in range(count)]

    def meet(n: int) -> bytes:
        other = f"{shared}/met{(n + 1) % count}"
        line = f"touch {shared}/met{n}; until [ -e {other} ]; do sleep 0.01; done; echo {n}"
        return boxes[n].run(line, timeout=60).stdout

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(meet, range(count))) == [f"{n}\n".encode() for n in range(count)]


def test_timeout_and_cancel_cut_a_command_off(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    assert box.run("echo x; sleep 600", timeout=0.3).ended == "timeout"
    cancel = threading.Event()
    result = box.run("echo x; sleep 600", cancel=cancel, on_output=lambda *_: cancel.set())
    assert (result.ended, result.stdout, result.exit_code) == ("cancelled", b"x\n", None)


def test_a_client_that_goes_away_cancels_its_command(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    with pytest.raises(ZeroDivisionError):
        box.run("echo $$ > pid; echo begun; sleep 600", on_output=lambda *_: 1 // 0, cancel=threading.Event())
    pid = int(box.get("/pid"))
    until(lambda: gone(pid))
    assert box.run("echo free", timeout=60).stdout == b"free\n"


def asleep(pid: int) -> bool:
    """Whether no thread of a process has anything to do, or it has ended."""
    threads = [file.name for file in Path(f"/proc/{pid}/task").glob("*")]
    return all("".join(processes.stat(pid, thread)[:1]) in ("", "S", "Z") for thread in threads)


def test_a_slow_reader_bounds_what_waits_for_it_and_loses_nothing(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    daemon = psutil.Process(pid_of(client.place.home))
    before, count, grown = daemon.memory_full_info().uss, 0, 0

    def read(stream: str, data: bytes) -> None:
        nonlocal count, grown
        if not count:
            grown = daemon.memory_full_info().uss - before
        count += len(data)

    class Slow(io.BytesIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if not self.tell():
                until(lambda: asleep(daemon.pid))
            return super().write(data)

    result = box.run("head -c 60000000 /dev/zero | tee file", on_output=read)
    assert (count, result.exit_code, result.tails) == (60_000_000, 0, ("stdout",)) and grown < 60e6
    out = Slow()
    box.get_to("/file", out)
    assert out.getvalue() == bytes(60_000_000) and daemon.memory_full_info().uss - before < 60e6


def test_turns_end_and_their_checkpoints_are_waited_for(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    box.run("touch hold")
    pending = box.end_turn("r1")
    assert not pending.done
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    pending.promote()
    turn = pending.wait(60)
    assert (turn.number, turn.request, turn.turn_class) == (1, "r1", TurnClass.FILES)
    with box.turn("r2"):
        box.run("rm hold")
    assert [turn.request for turn in box.log().turns] == ["r1", "r2"] and box.turns == 2
    box.run("touch broken")
    with pytest.raises(SandboxError, match="disk is full"):
        box.end_turn().wait(60)


def test_faults_arrive_as_what_they_are(client: Client) -> None:
    faults = {
        "missing": (UserError, "unknown"),
        "full": (SandboxError, "disk is full"),
        "bug": (HostError, "KeyError"),
    }
    for image, (kind, words) in faults.items():
        with pytest.raises(kind, match=words):
            Sandbox(SandboxSpec("b", image=image), where=client.place.home, start=False)
    box = client.create(SandboxSpec("a"))
    box.run("echo it is watched > odd")
    with pytest.raises(IncompleteError, match="odd is not kept") as less:
        box.checkpoint()
    assert less.value.manifest == box.log().checkpoints[-1] and less.value.lacks[0].kind == "processes"
    with pytest.raises(IncompleteError) as less:
        box.restore()
    assert less.value.report is not None and less.value.report.restored == ("files",)
    with pytest.raises(SandboxDied, match="dead"):
        box.run("true")
    with pytest.raises(UserError, match="unknown"):
        client.get("nope")
    with pytest.raises(UserError, match="is no file"):
        box.get("/none")


def test_a_sandbox_by_its_name(client: Client) -> None:
    home = client.place.home
    with Sandbox("a", where=home, start=False) as box, box.turn():
        assert box.run("echo hi").stdout == b"hi\n"
    with Sandbox.connect(home, start=False) as host:
        again = host.get("a")
        assert (again.name, again.turns, again.info().status) == ("a", 1, "running")
        again.wait(timeout=1)


def test_the_same_calls_awaited(client: Client) -> None:
    async def life() -> int:
        async with await connect_async(client.place.home, start=False) as host:
            box = await host.create(SandboxSpec("a", environment={"A": "1"}))
            async with box.turn("r"):
                await box.put("/f", b"\0\xff")
            (fork,) = await host.fork((await box.checkpoint("x", pin=True)).id, name="b")
            assert (fork.name, await fork.get("/f")) == ("b", b"\0\xff")
            assert (await fork.spec()).environment == {"A": "1"}
            assert (await (await box.end_turn("r2")).wait(60)).request == "r2"
            results = await asyncio.gather(
                *(sandbox.run(f"echo {sandbox.name}") for sandbox in (box, fork) * 4)
            )
            assert [result.stdout for result in results] == [b"a\n", b"b\n"] * 4
            begun, loop = asyncio.Event(), asyncio.get_running_loop()
            said = {"on_output": lambda *_: loop.call_soon_threadsafe(begun.set)}
            run = asyncio.create_task(box.run("echo $$ > pid; echo begun; sleep 600", **said))
            await asyncio.wait_for(begun.wait(), 20)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert (await box.run("echo free", timeout=60)).stdout == b"free\n"
            with pytest.raises(UserError, match="unknown"):
                await host.get("nope")
            return int(await box.get("/pid"))

    pid = asyncio.run(life())
    until(lambda: gone(pid))


class Changing:
    """A sandbox whose folder ``/d`` has a link that becomes a folder."""

    def __init__(self, outside: Path) -> None:
        kinds = FolderEntry("x", "link", 0, target=str(outside)), FolderEntry("x", "folder", 0)
        self.entries: Iterator[FolderEntry] = iter(kinds)

    def listdir(self, path: str) -> list[FolderEntry]:
        return [next(self.entries)] if path == "/d" else [FolderEntry("f", "file", 2, 0o644)]

    def get_to(self, path: str, out: IO[bytes]) -> None:
        out.write(b"in")


def test_a_link_of_an_earlier_copy_leads_no_later_one_out_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    box: Any = Changing(outside)
    for _ in range(2):
        get_path(box, "/d", tmp_path / "out")
    assert (tmp_path / "out" / "x" / "f").read_bytes() == b"in"
    assert list(outside.iterdir()) == []
