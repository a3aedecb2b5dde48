"""Sums by a real switch: exact whatever happens to packets, and an error by the deadline where nobody is."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from support.aggregation import TOKEN, at_once, integers, joined, mangled, standing, summed, udp
from support.ranks import run_ranks
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.cli.main import main
from windtunnel.linux import datagrams
from windtunnel.network.aggregation.live import wire
from windtunnel.network.aggregation.live.worker import AggregationLost, connect

pytestmark = pytest.mark.xdist_group("aggregation")  # one process loads, or compiles, the loops
RANKS = Path(__file__).parent / "ddp_ranks.py"
SIZE = 12_000


@pytest.mark.parametrize(
    ("policy", "slots", "loss", "direct"),
    [("esa", 16, 0.0, False), ("atp", 16, 0.05, False), ("switchml", 64, 0.05, True), ("esa", 16, 0.2, True)],
)
def test_sums_are_exact_and_slots_are_free_when_all_have_left(
    policy: str, slots: int, loss: float, direct: bool
) -> None:
    with standing(policy=policy, slots=slots, loss=loss, direct=direct, jobs=2) as place:
        with joined([place.address] * 4, window=48) as workers:
            for size in (1, SIZE):
                tensors = [integers(rank, size) for rank in range(4)]
                sums = summed(workers, tensors)
                assert all(torch.equal(total, sum(tensors)) for total in sums)
            assert place.server.report()["parts"] > 0 or policy == "switchml"
        if not loss:  # else who leaves may not be heard
            until(lambda: place.switch.memory.jobs["token"][0] == 0)
            assert not place.switch.memory.slots["occupied"].any()


def test_a_parameter_is_summed_as_other_tensors_are() -> None:
    with standing(jobs=1) as place, joined([place.address] * 2, window=48) as workers:
        tensors: list[torch.Tensor] = [torch.nn.Parameter(torch.full((5,), 1.0 + rank)) for rank in range(2)]
        assert all(total.tolist() == [3.0] * 5 for total in summed(workers, tensors))


@pytest.mark.parametrize("reply", [b"", b"no switch"])
def test_who_answers_and_is_no_switch_is_none_by_the_deadline(reply: bytes) -> None:
    with udp() as other:
        other.settimeout(30.0)

        def answers() -> None:
            _, worker = other.recvfrom(4096)
            other.sendto(reply, worker)

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answers)
            with pytest.raises(AggregationLost, match="cannot be reached"):
                connect(other.getsockname(), rank=0, world=1, token=5, deadline=0.3)
            answered.result()


def test_packets_that_are_lost_doubled_and_reordered_are_in_no_sum_twice() -> None:
    tensors = [integers(rank, SIZE) for rank in range(3)]
    with (
        standing(slots=24, jobs=2) as place,
        mangled(place.address, 3) as addresses,
        joined(addresses, window=16) as workers,
    ):
        assert all(torch.equal(total, sum(tensors)) for total in summed(workers, tensors))
        assert sum(worker.resent for worker in workers) > 0


def test_what_saturates_or_is_not_finite_goes_as_floats() -> None:
    with standing() as place, joined([place.address] * 3, headroom=0) as workers:
        tensors = [torch.full((1000,), 3.9) for _ in range(3)]
        tensors[0][400], tensors[1][400] = float("inf"), -1e30
        tensors[0][800], tensors[1][801] = float("nan"), 1.5
        wanted = torch.stack(tensors).double().sum(dim=0).float()
        for total in summed(workers, tensors):
            torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)
        assert [worker.floats for worker in workers] == [3, 3, 3]
        small = [integers(rank, 10).to(torch.bfloat16) for rank in range(3)]
        rounded = torch.stack(small).float().sum(dim=0).to(torch.bfloat16)
        assert all(torch.equal(total, rounded) for total in summed(workers, small))
        with pytest.raises(UserError, match="accepted are floating types"):
            workers[0].all_reduce(torch.ones(3, dtype=torch.int64))


def test_garbage_and_forged_packets_change_nothing() -> None:
    """Somebody who can reach the switch, and even knows the token, but is not at a worker's address."""
    rng = np.random.default_rng(0)
    with standing(jobs=2) as place, joined([place.address] * 2) as workers, udp() as attacker:
        summed(workers, [integers(rank, 100) for rank in range(2)])
        own = workers[0]._memory.state[0]
        forged = np.zeros(1, wire.PACKET)
        heads = [
            {"kind": kind, "token": token, "sequence": sequence, "bits": bits, "job": job, "magic": magic}
            for kind in (wire.GRADIENT, wire.RESENT, wire.FLUSHED, wire.RESULT, wire.REMINDER, wire.KNOWN)
            for token, sequence, bits, job, magic in (
                (TOKEN, int(own["floor"]), 1, 0, wire.MAGIC), (TOKEN + 1, 0, 1, 0, wire.MAGIC),
                (TOKEN, -1, 3, 0, wire.MAGIC), (TOKEN, 2**62, 0, 99, wire.MAGIC), (TOKEN, 0, 1, 0, 1),
            )
        ]  # fmt: skip
        for head in heads:
            for name, value in head.items():
                forged[name] = value
            forged["values"] = 7
            attacker.sendto(forged.tobytes(), place.address)
            attacker.sendto(forged.tobytes()[: wire.SHORT], place.address)
        for size in (0, 1, 39, 41, 1447, 1449, 9000):
            attacker.sendto(rng.bytes(size), place.address)
        for kind in range(wire.JOIN, 256):
            attacker.sendto(wire.control(kind, TOKEN, bits=0, to=2, sequence=9), place.address)
        for bits, world in ((0, 0), (5, 3), (0, 4_000_000_000)):
            attacker.sendto(wire.control(wire.JOIN, 5, bits=bits, to=world, sequence=9), place.address)
        forged["magic"], forged["token"], forged["sequence"] = wire.MAGIC, TOKEN, 2**40
        forged["bits"], forged["job"], forged["kind"] = 1, 0, wire.GRADIENT
        workers[0]._sock.send(forged.tobytes())  # a worker cannot be that far ahead
        until(lambda: place.switch.memory.counts["refused"][0] > 2 * len(heads))
        tensors = [integers(rank, SIZE) for rank in range(2)]
        assert all(torch.equal(total, sum(tensors)) for total in summed(workers, tensors))


def test_a_worker_that_is_gone_ends_the_others_by_their_deadline_and_for_good() -> None:
    with standing() as place, joined([place.address] * 2) as workers:
        began = time.monotonic()
        with pytest.raises(AggregationLost, match=r"worker 0 has 0 of .* sums after 0\.3 s"):
            workers[0].all_reduce(torch.ones(5000), deadline=0.3)
        assert time.monotonic() - began >= 0.3
        with pytest.raises(AggregationLost):
            workers[0].all_reduce(torch.ones(1))


def test_as_many_jobs_as_it_takes_and_one_more_is_refused() -> None:
    with standing(jobs=1) as place, joined([place.address]):
        with pytest.raises(UserError, match="refuses worker 0 of 1"):
            connect(place.address, rank=0, world=1, token=9)
        with pytest.raises(UserError, match="refuses worker 1 of 2"):  # the first has one worker
            connect(place.address, rank=1, world=2, token=TOKEN)


def started(*words: str) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    line = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "network", "aggregation"]
    process = subprocess.Popen([*line, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    announcement = process.stdout.readline()
    host, port = announcement.split()[1].rstrip(",").split(":")
    return process, (host, int(port))


@pytest.mark.parametrize("victim", ["switch", "server"])
def test_a_switch_or_server_that_is_killed_in_the_midst_ends_all_by_their_deadline(victim: str) -> None:
    with udp() as free:
        place = "{}:{}".format(*free.getsockname())
    server, behind = started("server", "--bind", "127.0.0.1:0", "--switch", place)
    switch, front = started("serve", "--bind", place, "--server", "{}:{}".format(*behind))
    try:
        with joined([front] * 2) as workers:
            assert all(
                torch.equal(total, torch.full((9,), 2.0)) for total in summed(workers, [torch.ones(9)] * 2)
            )

            def first() -> str:
                with pytest.raises(AggregationLost) as error:
                    workers[0].all_reduce(torch.ones(SIZE), deadline=1.5)
                return str(error.value)

            def second() -> str:
                until(lambda: workers[0]._memory.state["next"][0] > workers[0]._memory.state["floor"][0])
                victims = {"switch": switch, "server": server}
                victims[victim].kill()
                victims[victim].wait()
                with pytest.raises(AggregationLost) as error:
                    workers[1].all_reduce(torch.ones(SIZE), deadline=1.0)
                return str(error.value)

            assert all("is gone" in message for message in at_once([first, second]))
        other = server if victim == "switch" else switch
        other.send_signal(signal.SIGTERM)
        assert other.communicate(timeout=60)[0].startswith("Stopped  {") and other.returncode == 0
    finally:
        for process in (switch, server):
            process.kill()
            process.communicate()


def test_a_hook_gives_ddp_the_means_that_all_reduce_gives() -> None:
    with standing() as place:
        done = run_ranks([RANKS, "{}:{}".format(*place.address)], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["equal", "equal"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--server", "x"], "address 'x' is none, accepted is such as"),
        (["serve", "--server", "a..b:1"], "address 'a..b:1' has a host that is not known"),
        (["server", "--switch", "a..b:1", "--bind", "127.0.0.1:0"], "--switch: address 'a..b:1' has a host"),
        (
            ["serve", "--server", "127.0.0.1:1", "--seed", "-1"],
            "'--seed': Input should be greater than or equal to 0",
        ),
        (["serve", "--server", "h:1", "--results", "y"], "--results 'y' is unknown; accepted are server"),
        (["serve", "--server", "127.0.0.1:1", "--bind", "127.0.0.1:0", "--policy", "z"], "policy 'z'"),
        (["serve", "--server", "127.0.0.1:1", "--bind", "127.0.0.1:0", "--slots", "0"], "slots is 0"),
        (["server", "--switch", "127.0.0.1:1", "--bind", "8.8.8.8:1"], "--bind 8.8.8.8:1 cannot be had"),
    ],
)
def test_bad_input_ends_in_a_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["windtunnel", "network", "aggregation", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_addresses_are_kept_as_the_kernel_has_them() -> None:
    for place in (("127.0.0.1", 7000), ("10.1.2.3", 65535), ("0.0.0.0", 1)):
        assert datagrams.address(datagrams.word(place)) == place
    with udp() as receiver, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        packets = np.zeros((4, 8), np.uint8).view("V8").reshape(4)
        came = datagrams.batch(4, packets)
        assert datagrams.receive(came, receiver.fileno()) < 0
        other.sendto(b"12345", receiver.getsockname())
        datagrams.wait(came, receiver.fileno(), False, 1000)
        assert datagrams.receive(came, receiver.fileno()) == 1
        assert came.messages["size"][0] == 5 and packets[0].tobytes()[:5] == b"12345"
        assert datagrams.address(int(came.addresses["word"][0]))[1] == other.getsockname()[1]
