"""Launched jobs whose services, networks and lent hosts are struck; and strangers, who stop nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.quick import windtunnel
from support.ranks import run_ranks
from support.strikes import kill_forkserver, kill_host, kill_worker, set_link
from support.waiting import until
from training.host_helpers import STAYS, finish, generation, here, kinds, knowing
from windtunnel.base import handshake, wire
from windtunnel.base.errors import UserError
from windtunnel.base.handshake import ClientHandshake
from windtunnel.base.keys import VARIABLE, Keys
from windtunnel.cli.main import app
from windtunnel.linux import network
from windtunnel.training import cleanup

LLAMA = Path(__file__).parents[3] / "examples" / "train_llama.py"


def test_the_fork_server_dies_and_the_next_worker_starts(go: Any, tmp_path: Path) -> None:
    launched = go()
    here(launched, 1, 2)
    kill_forkserver(launched)
    kill_worker(launched, 0)
    here(launched, 2, 2)
    finish(launched, tmp_path)


@pytest.mark.slow
def test_all_dies_but_the_launcher(go: Any, tmp_path: Path) -> None:
    launched = go()
    here(launched, 1, 2)
    kill_forkserver(launched)
    kill_host(launched, 0)
    kill_host(launched, 1)
    until(lambda: generation(launched) >= 2)
    here(launched, generation(launched), 2)
    finish(launched, tmp_path)


@pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")
@pytest.mark.slow
def test_hosts_with_a_network_each(go: Any, tmp_path: Path) -> None:
    launched = go(network="netns", rate=10e6)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 2)}
    places = launched.places()
    assert len({os.readlink(f"/proc/{status['pid']}/ns/net") for status in places.values()}) == 2
    for place, status in places.items():
        (pid,) = status["workers"].values()
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{places[place]['pid']}/ns/net")
    assert "rate 80Mbit" in subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    set_link(launched, 1, up=False)
    second = {event["rank"]: event["pid"] for event in here(launched, 2, 2)}
    assert second[0] == first[0]
    assert kinds(launched.events(), "lost")[0]["evidence"] == "lease"
    kill_host(launched, 1, silent=True)
    here(launched, 3, 2)
    finish(launched, tmp_path)
    bridge = f"wt{launched.token.rpartition('-')[2]}"
    left = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert bridge not in left
    assert not list(Path("/run/netns").glob(f"{bridge}*"))


def test_what_a_killed_lent_host_leaves_is_swept(go: Any, tmp_path: Path) -> None:
    launched = go(hosts=1, listen="127.0.0.1:0")
    code = "import sys; from windtunnel.training.session import lend; lend(sys.argv[1], '', '')"
    lent = subprocess.Popen([sys.executable, "-c", code, launched._offer.address], env=knowing(launched))
    here(launched, 1, 1)
    lent.kill()
    lent.wait(30)
    (left,) = cleanup.MEMORY.glob(f"{launched.token}-host-*")
    assert left.name in cleanup.sweep()
    assert not left.exists()


def strike(address: str, service: str) -> None:
    """All that a stranger has: our words without a secret, with another, and too many of them."""
    for words in (
        wire.frame({"op": "hello", "host": None, "workers": [], "address": "x", "memory": "x"}, 0, None),
        wire.frame({"op": "list"}, 0, None),
        wire.HEAD.pack(200_000, 0) + b"[" * 200_000,
        ClientHandshake(Keys(b"some other secret"), service).hello + bytes(32),
    ):
        with wire.connect(address, 10.0) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(words)
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
            assert len(answer) in (0, ClientHandshake.ANSWER)  # at most a nonce and a proof that is of no use
    with pytest.raises(ConnectionError):
        handshake.connect(address, 10.0, Keys(b"some other secret"), service)


SLOW = """
import os, pathlib, time
first = pathlib.Path(os.environ["SLOW"])
if first.exists(): time.sleep(6.0)
first.touch()
"""


def test_ranks_are_not_late_while_the_fork_server_that_is_to_start_one_still_imports(
    go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "SLOW": str(tmp_path / "imported")}
    groups = STAYS.replace('"here", generation', '"grouped", generation, rank=int(os.environ["RANK"])')
    assert groups != STAYS
    launched = go(groups, preload=("slow_to_import",), env=env, deadlines={"form": 4.0})

    def grouped(generation: int) -> list[dict[str, Any]]:
        return [e for e in kinds(launched.events(), "grouped") if e["generation"] >= generation]

    until(lambda: len({event["rank"] for event in grouped(1)}) == 2)
    os.kill(launched.site.forkserver.process.pid, signal.SIGSTOP)
    kill_worker(launched, 1)
    until(lambda: launched.outcome or len({event["rank"] for event in grouped(2)}) == 2)
    assert launched.outcome is None
    assert not [event for event in kinds(launched.events(), "lost") if "joined no group" in event["error"]]
    finish(launched, tmp_path)


def test_a_fork_server_that_ends_while_it_starts_a_worker_stops_no_launcher(
    go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = go()
    here(launched, 1, 2)
    server = launched.site.forkserver.process.pid
    with monkeypatch.context() as patch:  # a worker that was asked for, and has no process yet
        patch.setattr(launched, "places", lambda: {0: {"workers": {0: None}}})
        os.kill(server, signal.SIGKILL)
        until(lambda: launched.site.forkserver.process.pid != server)
        until(lambda: None in launched._adopted or not launched._adopted)
    kill_worker(launched, 1)
    here(launched, 2, 2)
    finish(launched, tmp_path)


def test_strangers_read_forge_and_stop_nothing(go: Any, tmp_path: Path) -> None:
    launched = go(hosts=2, listen="127.0.0.1:0")
    for given, sentence in (
        (None, "the secret of that job is needed"),
        ("some other secret", "does not know the job's secret"),
    ):
        refusal = CliRunner().invoke(app, ["host", launched._offer.address], env={VARIABLE: given})
        assert isinstance(refusal.exception, UserError) and sentence in str(refusal.exception)
    code = "import sys; from windtunnel.training.session import lend; lend(sys.argv[1], '', '')"
    lent = [
        subprocess.Popen([sys.executable, "-c", code, launched._offer.address], env=knowing(launched))
        for _ in range(2)
    ]
    here(launched, 1, 2)
    struck = [(launched._supervisor.address, "rpc"), (launched._offer.address, "rpc")]
    for joined in kinds(launched.events(), "host.joined"):
        struck.append((joined["memory"], f"memory {joined['memory']}"))
    with ThreadPoolExecutor(len(struck)) as strangers:  # each is kept waiting for some seconds
        list(strangers.map(strike, *zip(*struck, strict=True)))
    # Nor is the secret where somebody might look for it: in no file that others may read, on no command line.
    secret = (launched.folder / "secret").read_text().strip().encode()
    for path in (path for path in launched.folder.rglob("*") if path.is_file()):
        assert path.stat().st_mode & 0o077 == 0 or secret not in path.read_bytes(), path
    for joined in kinds(launched.events(), "host.joined"):
        assert secret not in Path(f"/proc/{joined['pid']}/cmdline").read_bytes()
    finish(launched, tmp_path)
    assert [process.wait(30) for process in lent] == [0, 0]
    assert len(kinds(launched.events(), "host.joined")) == 2  # nobody else


def test_a_new_host_prints_where_the_first_did(go: Any, tmp_path: Path) -> None:
    """Whatever the caller does with the number of the file that it gave."""
    given, other = (tmp_path / "given").open("wb"), (tmp_path / "other").open("wb")
    with given, other:
        launched = go(output=given.fileno())
        here(launched, 1, 2)
        os.dup2(other.fileno(), given.fileno())
        kill_host(launched, 1)
        here(launched, 2, 2)
        finish(launched, tmp_path)
    assert '"generation": 2' in (tmp_path / "given").read_text()
    assert not (tmp_path / "other").read_text()


def test_llama_leaves_no_doubt(tmp_path: Path) -> None:
    """Its loader is in its state: a lost host changes nothing, and nothing is said of it."""
    words = ["--size", "debug", "--steps", "4", "--seq", "32", "--grad-accum", "2"]
    train = ["train", "--hosts", "2", "--inject", "kill:host=1,step=2", "--json", "--out", tmp_path / "run"]
    struck = windtunnel(*train, LLAMA, *words)
    assert struck.returncode == 0, struck.stderr
    summary = json.loads(struck.stdout)
    assert summary["guarantee"] == "bit-identical"
    assert len(summary["recoveries"]) == 1
    undisturbed = run_ranks([LLAMA, *words], 2)
    losses = [
        set(re.findall(r"step (\d+)  loss (\S+)", text)) for text in (struck.stderr, undisturbed.stdout)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
