"""The daemon over its Unix socket: commands, order, errors, turns, files."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from support.waiting import gone, until
from windtunnel.agents.sandbox.client import Client
from windtunnel.agents.sandbox.client.wire import Collector
from windtunnel.agents.sandbox.errors import SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import Limits, SandboxSpec, TurnClass
from windtunnel.base.errors import UserError
from windtunnel.linux import processes


def raw(client: Client) -> httpx.Client:
    """The daemon without the client's help."""
    transport = httpx.HTTPTransport(uds=str(client.place.home) + "/daemon.sock")
    return httpx.Client(transport=transport, base_url="http://sandbox", timeout=60)


def test_a_spec_arrives_whole(client: Client) -> None:
    spec = SandboxSpec(
        name="a",
        image="x",
        network="proxy",
        limits=Limits(memory=None, cpus=1.5, pids=9, disk=1 << 30),
        environment={"A": "ü b"},
        workdir="/w",
        hostname="h",
        services={"web": "serve &"},
        proxy_upstream="http://model",
    )
    assert client.create(spec).spec == spec


def test_output_is_exact_whatever_its_bytes_are(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    pieces: list[tuple[str, bytes]] = []
    result = box.run(
        r"printf 'ok\n\0\xff\xe2\x80\xa8\r\n'; printf 'e\xc3' >&2; exit 7",
        on_output=lambda stream, data: pieces.append((stream, data)),
    )
    assert result.stdout == b"ok\n\0\xff\xe2\x80\xa8\r\n"
    assert result.stderr == b"e\xc3"
    assert (result.exit_code, result.ended) == (7, "exit")
    assert b"".join(data for stream, data in pieces if stream == "stdout") == result.stdout


def test_large_output_is_exact(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    result = box.run("head -c 5000000 /dev/urandom | tee copy; seq 300000 >&2")
    assert result.stdout == box.get("/copy")
    assert len(result.stdout) == 5_000_000
    assert result.note == ""
    assert result.stderr == "".join(f"{n}\n" for n in range(1, 300001)).encode()


def test_sandboxes_run_side_by_side_and_each_in_order(client: Client) -> None:
    """Every sandbox waits for a file that the next one makes: one after the other they would never end."""
    count = 6
    boxes = [client.create(SandboxSpec(f"b{n}")) for n in range(count)]
    shared = client.place.home
    assert shared is not None

    def meet(n: int) -> bytes:
        other = f"{shared}/met{(n + 1) % count}"
        line = f"touch {shared}/met{n}; until [ -e {other} ]; do sleep 0.01; done; echo {n}"
        return boxes[n].run(line, timeout=60).stdout

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(meet, range(count))) == [f"{n}\n".encode() for n in range(count)]

    box = boxes[0]
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            box.run, "echo begun; sleep 0.3; echo first >> order", on_output=lambda *_: started.set()
        )
        assert started.wait(60)
        assert box.info().status == "running"  # looking does not wait for the command
        box.run("echo second >> order")
        first.result()
    assert box.get("/order") == b"first\nsecond\n"


def test_timeout_and_cancel_cut_a_command_off(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    assert box.run("echo x; sleep 600", timeout=0.3).ended == "timeout"
    cancel = threading.Event()
    result = box.run("echo x; sleep 600", cancel=cancel, on_output=lambda *_: cancel.set())
    assert (result.ended, result.stdout, result.exit_code) == ("cancelled", b"x\n", None)


def test_a_client_that_goes_away_cancels_its_command(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    with raw(client) as http:
        body = {"command": "echo $$ > pid; echo begun; sleep 600", "id": "mine"}
        with http.stream("POST", "/v1/boxes/a/exec", json=body) as response:
            assert next(response.iter_raw()) == b'{"stdout":"begun\\n"}\n'
    pid = int(box.get("/pid"))  # waits for no lane, so it may come before the command is gone
    until(lambda: gone(pid))
    assert box.run("echo free", timeout=60).stdout == b"free\n"


def test_a_quiet_command_is_cancelled_too(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    with raw(client) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/boxes/a/exec", json={"command": "sleep 600"}, timeout=httpx.Timeout(0.5))
    assert box.run("echo free", timeout=60).stdout == b"free\n"


def asleep(pid: int) -> bool:
    """Whether no thread of a process has anything to do, or it has ended."""
    threads = [file.name for file in Path(f"/proc/{pid}/task").glob("*")]
    return all("".join(processes.stat(pid, thread)[:1]) in ("", "S", "Z") for thread in threads)


def resident(pid: int) -> int:
    """Bytes that are the process's own; of a fork, what it shares with its parent does not count."""
    return psutil.Process(pid).memory_full_info().uss


def test_a_slow_reader_bounds_what_waits_for_it_and_loses_nothing(client: Client) -> None:
    client.create(SandboxSpec("a")).run("true")
    collector = Collector()
    before = resident(client.health().pid)
    with raw(client) as http:
        body = {"command": "echo $$ > pid; exec head -c 60000000 /dev/zero"}
        with http.stream("POST", "/v1/boxes/a/exec", json=body) as response:
            pieces = response.iter_raw(1 << 16)
            collector.take(next(pieces))
            daemon, command = client.health().pid, int(client.get("a").get("/pid"))
            # Then the daemon has filled whatever it would fill: what it waits for wakes it at once.
            until(lambda: asleep(daemon) and (gone(command) or asleep(command)))
            grown = resident(daemon) - before
            for piece in pieces:
                collector.take(piece)
    assert collector.complete().stdout == bytes(60_000_000)
    assert grown < 120e6  # as text the output is six times as long


def test_a_command_may_go_on_without_its_client(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    with raw(client) as http:
        body = {"command": "echo begun; sleep 0.3; echo whole > done", "cancel_on_disconnect": False}
        with http.stream("POST", "/v1/boxes/a/exec", json=body) as response:
            next(response.iter_raw())
    assert box.run("cat done").stdout == b"whole\n"


def test_stop_ends_what_runs_and_what_waits(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    begun = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(box.run, "echo x; sleep 600", on_output=lambda *_: begun.set())
        assert begun.wait(60)
        waiting = pool.submit(box.run, "echo never > ran")
        box.stop()
        assert running.result(60).ended == "cancelled"
        # it was told to cancel, or came after the stop, depending on which request was first
        error = waiting.exception(60)
        assert isinstance(error, SandboxDied) or waiting.result().note == "cancelled before it began"
    with pytest.raises(SandboxDied):
        box.run("true")
    assert "ran" not in [entry.name for entry in box.listdir("/")]


def test_turns_end_and_their_checkpoints_are_waited_for(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    result, pending, problem = box.run_turn("touch hold; echo x", request="r1")
    assert (result.stdout, problem) == (b"x\n", None)
    assert pending is not None and not pending.done
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    pending.promote()
    turn = pending.wait(60)
    assert (turn.number, turn.request, turn.turn_class) == (1, "r1", TurnClass.FILES)
    with box.turn("r2"):
        box.run("rm hold")
    assert [one.request for one in box.log().turns] == ["r1", "r2"]
    box.run("touch broken")
    with pytest.raises(SandboxError, match="disk is full"):
        box.end_turn().wait(60)


def test_checkpoints_travel_with_all_fields(client: Client) -> None:
    box = client.create(SandboxSpec("a", environment={"A": "1"}))
    box.run("echo one > file")
    made = box.checkpoint("first", full=True, pin=True)
    assert (made.label, made.turn_class, made.pinned, made.spec) == ("first", TurnClass.FULL, True, box.spec)
    assert box.log().checkpoints == (made,)
    assert box.log().tips == {"a": made.id}
    box.run("echo two > file")
    assert box.restore().restored == ("files",)
    assert box.get("/file") == b"one\n"
    assert box.diff(made.id).files[0].path == "/a"
    forks = client.fork(made.id, 2, names=["x", "y"])
    assert [one.get("/file") for one in forks] == [b"one\n", b"one\n"]
    assert client.get("x").info().base == made.id
    assert set(client.notice(30)) == {"a", "x", "y"}
    assert client.gc(dry_run=True).bytes_freed == 0
    assert client.verify("a").damaged[0].instead == "c8" and not client.verify().damaged
    assert client.export("a", "/tmp/x").box == "a"
    assert client.import_("/tmp/x", "z").info().image == "/tmp/x"
    assert {one.name: one.present for one in client.doctor()} == {"root": True, "criu": False}


def test_files_go_in_and_out_whole(client: Client) -> None:
    box = client.create(SandboxSpec("a"))
    data = bytes(range(256)) * 20_000
    box.put("/d/big", io.BytesIO(data), 0o640)
    assert box.get("/d/big") == data
    box.put("/d/none", b"")
    assert box.get("/d/none") == b""
    assert [(one.name, one.size) for one in box.listdir("/d")] == [("big", len(data)), ("none", 0)]
    assert box.run("stat -c %a d/big").stdout == b"640\n"


def test_a_file_that_comes_only_in_part_is_not_written(client: Client) -> None:
    box = client.create(SandboxSpec("a"))

    class Broken(io.RawIOBase):
        count = 0

        def read(self, size: int = -1) -> bytes:
            self.count += 1
            if self.count > 3:
                raise OSError("the disk of the client failed")
            return b"x" * (1 << 20)

    with pytest.raises(OSError, match="disk of the client"):
        box.put("/part", Broken())  # type: ignore[arg-type]
    # The lane is free again only when the daemon has given the file up.
    box.run("true", timeout=60)
    assert "part" not in [one.name for one in box.listdir("/")]


def test_what_happens_is_told_to_listeners(client: Client) -> None:
    seen: list[tuple[str, str]] = []

    def listen() -> None:
        for event in client.events():
            seen.append((event.kind, event.box))
            if event.box == "last":
                return

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(listen)
        number = 0

        def one_more() -> bool:
            nonlocal number
            number += 1
            client.create(SandboxSpec(f"b{number}"))
            return bool(seen)

        until(one_more)
        client.create(SandboxSpec("last"))
        heard.result(60)
    assert seen[-1] == ("created", "last")


@pytest.mark.parametrize(
    ("image", "status", "kind", "words"),
    [
        ("missing", 400, "user", "is unknown"),
        ("full", 507, "full", "disk is full"),
        ("bug", 500, "fault", "unexpected KeyError"),
    ],
)
def test_faults_of_the_host_have_a_status_and_a_sentence(
    client: Client, image: str, status: int, kind: str, words: str
) -> None:
    with raw(client) as http:
        answer = http.post("/v1/boxes", json={"name": "a", "image": image})
    assert answer.status_code == status
    assert answer.json()["kind"] == kind
    assert words in answer.json()["error"]


def test_wrong_requests_are_refused_in_words(client: Client) -> None:
    client.create(SandboxSpec("a"))
    with raw(client) as http:

        def said(method: str, path: str, body: object = None) -> tuple[int, str]:
            answer = http.request(method, path, json=body)
            return answer.status_code, answer.json()["error"]

        assert said("POST", "/v1/boxes", {"name": "a"})[0] == 409
        assert said("GET", "/v1/boxes/nope")[0] == 404
        assert said("GET", "/v1/nonsense")[0] == 404
        assert said("POST", "/v1/executions/nope/cancel")[0] == 404
        assert said("GET", "/v1/boxes/a/turns/nope")[0] == 404
        status, sentence = said("POST", "/v1/boxes", {"name": "b", "netwrok": "off"})
        assert status == 400 and "netwrok" in sentence
        status, sentence = said("POST", "/v1/boxes", {"name": "b", "limits": {"memory": -1}})
        assert status == 400 and "limits.memory" in sentence and "-1" in sentence
        status, sentence = said("POST", "/v1/boxes/a/exec", {"command": "true", "timeout": 0})
        assert status == 400 and "timeout" in sentence
        assert said("POST", "/v1/boxes/a/rollback", {})[0] == 400
        assert said("GET", "/v1/boxes/Bad Name")[0] == 400
        assert http.put("/v1/boxes/a/files", params={"path": "/x", "mode": "99"}).status_code == 400
        assert http.get("/v1/boxes/a/files", params={"path": "/none"}).json()["error"].endswith("is no file")
    with pytest.raises(UserError, match="unknown"):
        client.get("nope")


def test_every_endpoint_is_described(client: Client) -> None:
    with raw(client) as http:
        described = http.get("/openapi.json").json()
    assert "/v1/boxes/{name}/exec" in described["paths"]
