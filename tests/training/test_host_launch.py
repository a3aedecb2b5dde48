"""Launched jobs: real supervisor, agents and fork server, scripts without torch; nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from host_helpers import STAYS, alive, environment, kinds, script
from typer.testing import CliRunner

from support.strikes import kill_agent, kill_forkserver, kill_host, kill_worker, set_link
from support.waiting import until
from windtunnel.base import handshake, wire
from windtunnel.base.errors import UserError
from windtunnel.base.handshake import ClientHandshake
from windtunnel.base.keys import VARIABLE, Keys
from windtunnel.cli.main import app
from windtunnel.linux import network
from windtunnel.linux.hosts import own_address
from windtunnel.training import cleanup
from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.spec import WAITS
from windtunnel.training.launch import Launched, launch

Launch = Any


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Launch]:
    begun: list[Launched] = []

    def begin(text: str = STAYS, *arguments: str, **options: Any) -> Launched:
        settings: dict[str, Any] = {"hosts": 2, "preload": (), "folder": tmp_path / "run", "lease": 5.0}
        with (tmp_path / "output").open("wb") as output:
            settings["output"] = output.fileno()
            launched = launch(script(tmp_path, text), arguments, **{**settings, **options})
        begun.append(launched)
        return launched

    yield begin
    for launched in begun:
        launched.close()
        assert cleanup.marked(launched.token) == []
        assert not launched.memory.exists()


def here(launched: Launched, generation: int, count: int) -> list[dict[str, Any]]:
    """``count`` ranks said that they are in ``generation``."""

    def said() -> list[dict[str, Any]] | None:
        found = [event for event in kinds(launched.events(), "here") if event["generation"] == generation]
        return found if len(found) >= count else None

    return until(said)


def generation(launched: Launched) -> int:
    return max((event["generation"] for event in kinds(launched.events(), "decided")), default=0)


def finish(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "run" / "stop").touch()
    outcome = launched.wait(60)
    assert outcome is not None
    assert outcome.status == 0, outcome


def test_a_job_runs_and_ends(go: Launch, tmp_path: Path) -> None:
    launched = go("import os, sys; print(os.environ['RANK'], sys.argv[1:])", "--x", per_host=2, spares=1)
    outcome = launched.wait(60)
    assert (outcome.status, set(outcome.results)) == (0, {0, 1, 2, 3})
    lines = (tmp_path / "output").read_text().splitlines()
    assert sorted(lines) == ["0 ['--x']", *(f"[rank {r}] {r} ['--x']" for r in (1, 2, 3))]
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 4
    assert (
        json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["config"]["spares"] == 1
    )


def test_a_job_that_fails_by_itself(go: Launch) -> None:
    launched = go(
        "import os; assert os.environ['RANK'] == '0'; __import__('time').sleep(600)",
        max_restarts=1,
    )
    outcome = launched.wait(60)
    assert outcome.status == 1
    assert "by itself 2 times" in outcome.reason
    lost = kinds(launched.events(), "lost")
    assert {event["rank"] for event in lost} == {1}
    assert lost[0]["own"] and "AssertionError" in lost[0]["error"]


def test_each_part_waits_as_it_was_told(go: Launch, tmp_path: Path) -> None:
    given = {wait.name: wait.default + 1 for wait in WAITS}
    launched = go("import time; time.sleep(0.3)", deadlines=given)
    assert launched.wait(60).status == 0
    told = asdict(launched._supervisor._settings.deadlines)
    assert told == {wait.name: given[wait.name] for wait in WAITS if wait.who == "supervisor"}
    agent = AgentConfig.read(tmp_path / "run" / "agents" / "host-0.config")
    for who in ("agent", "memory"):
        assert agent.job.waits(who) == {wait.name: given[wait.name] for wait in WAITS if wait.who == who}
    assert [agent.worker[name] for name in ("operation", "generation", "cut")] == [61, 3601, 3]
    told = agent.job.checkpoints
    assert (told["patience"], told["stored"]) == (given["commit"], given["stored"])


BLAMES = """
import os, sys, time
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if os.environ["RANK"] == "0" and (first or sys.argv[1:]):
    print("Warning: something harmless", file=sys.stderr)
    raise RuntimeError("[/x/gloo/gloo/transport/tcp/pair.cc:457] Application timeout caused pair closure")
while first or sys.argv[1:]:
    time.sleep(1)
"""


def test_a_healthy_rank_that_waits_for_a_hung_one_has_not_failed_by_itself(go: Launch) -> None:
    """gloo's timeout is grounds to suspect a peer; again and again in vain it ends the job."""
    launched = go(BLAMES, max_restarts=0)
    assert launched.wait(60).status == 0
    (lost,) = kinds(launched.events(), "lost")
    assert not lost["own"] and "pair closure" in lost["error"]


def test_what_is_in_vain_again_and_again_ends(go: Launch) -> None:
    outcome = go(BLAMES, "always", max_restarts=0).wait(60)
    assert outcome.status == 1
    assert "waited for each other in vain 4 times" in outcome.reason
    assert "Application timeout caused pair closure" in outcome.reason


def test_what_was_merely_printed_is_no_cause(go: Launch) -> None:
    text = "import os, sys; print('harmless', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    launched = go(
        f"import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' and os.environ['RANK'] == '1': {text}"
    )
    assert launched.wait(60).status == 0
    assert [lost["error"] for lost in kinds(launched.events(), "lost")] == ["killed by SIGKILL"]


def test_a_killed_worker_is_replaced_and_the_others_go_on(go: Launch, tmp_path: Path) -> None:
    launched = go(hosts=3)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 3)}
    kill_worker(launched, 1)
    second = {event["rank"]: event["pid"] for event in here(launched, 2, 3)}
    assert (first[0], first[2]) == (second[0], second[2])
    assert first[1] != second[1]
    finish(launched, tmp_path)


def test_a_stopped_worker_is_fenced(go: Launch, tmp_path: Path) -> None:
    launched = go(frozen_after=0.5)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 2)}
    kill_worker(launched, 0, signal.SIGSTOP)
    here(launched, 2, 2)
    until(lambda: not alive(first[0]))
    assert kinds(launched.events(), "lost")[0]["evidence"] == "frozen"
    finish(launched, tmp_path)


def test_a_lost_host_is_ordered_anew(go: Launch, tmp_path: Path) -> None:
    launched = go()
    here(launched, 1, 2)
    before = launched.places()[1]
    kill_host(launched, 1)
    here(launched, 2, 2)
    after = until(lambda: launched.places().get(1))
    assert after["host"] != before["host"]
    assert not Path(before["memory"]).exists()
    until(lambda: not any(alive(pid) for pid in before["workers"].values()))
    finish(launched, tmp_path)


def test_a_spare_takes_the_place(go: Launch, tmp_path: Path) -> None:
    launched = go(spares=1)
    here(launched, 1, 2)
    until(lambda: len(kinds(launched.events(), "host.joined")) == 3)
    kill_agent(launched, 0)
    here(launched, 2, 2)
    assert kinds(launched.events(), "ordered") == []
    finish(launched, tmp_path)


def test_a_job_shrinks(go: Launch, tmp_path: Path) -> None:
    launched = go(hosts=3, on_loss="shrink", min_hosts=2)
    first = {event["rank"]: event["pid"] for event in here(launched, 1, 3)}
    kill_host(launched, 0)
    second = {event["rank"]: event["pid"] for event in here(launched, 2, 2)}
    assert sorted(second.values()) == sorted((first[1], first[2]))
    assert set(second) == {0, 1}
    finish(launched, tmp_path)


def test_the_fork_server_dies_and_the_next_worker_starts(go: Launch, tmp_path: Path) -> None:
    launched = go()
    here(launched, 1, 2)
    kill_forkserver(launched)
    kill_worker(launched, 0)
    here(launched, 2, 2)
    finish(launched, tmp_path)


@pytest.mark.slow
def test_all_dies_but_the_launcher(go: Launch, tmp_path: Path) -> None:
    launched = go()
    here(launched, 1, 2)
    kill_forkserver(launched)
    kill_host(launched, 0)
    kill_host(launched, 1)
    until(lambda: generation(launched) >= 2)
    here(launched, generation(launched), 2)
    finish(launched, tmp_path)


def test_an_exception_in_the_callers_code_ends_everything(go: Launch) -> None:
    launched = go()
    here(launched, 1, 2)
    with pytest.raises(ZeroDivisionError), launched:
        raise ZeroDivisionError
    assert cleanup.marked(launched.token) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": 0}, "`hosts` 0: at least 1"),
        ({"per_host": 0}, "`per_host` 0: at least 1"),
        ({"faults": ("kill:host=2,step=1",)}, "places are 0 to 1"),
        ({"faults": ("kill:rank=9,step=1",)}, "ranks are 0 to 1"),
        ({"faults": ("explode",)}, "unknown action"),
        ({"faults": ("down:host=0,step=1",)}, "`network` netns"),
        ({"network": "wifi"}, "accepted are loopback, netns"),
        ({"rate": 1e6}, "netns"),
        ({"lease": 0.0}, "`lease` 0"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        launch(script(tmp_path, ""), **{"hosts": 2, "folder": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


def test_a_script_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        launch(tmp_path / "none.py", hosts=1, folder=tmp_path / "run")


def test_an_agent_that_cannot_begin_ends_the_run(go: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "write", lambda _, path: path.write_text("{}"))
    outcome = go(hosts=1).wait(60)
    assert outcome.status == 1
    assert "ended with status 1 before it joined" in outcome.reason


@pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")
@pytest.mark.slow
def test_hosts_with_a_network_each(go: Launch, tmp_path: Path) -> None:
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


def knowing(launched: Launched) -> dict[str, str]:
    return {**environment(), "WINDTUNNEL_SECRET": (launched.folder / "secret").read_text()}


def test_hosts_that_are_not_ours_join(go: Launch, tmp_path: Path) -> None:
    launched = go(hosts=2, listen="127.0.0.1:0")
    code = (
        "import sys; from windtunnel.training.session import lend;"
        "raise SystemExit(lend(sys.argv[1], '', 'rack'))"
    )
    lent = [
        subprocess.Popen([sys.executable, "-c", code, launched._offer.address], env=knowing(launched))
        for _ in range(2)
    ]
    here(launched, 1, 2)
    assert {event["domain"] for event in kinds(launched.events(), "host.joined")} == {"rack"}
    finish(launched, tmp_path)
    assert [process.wait(30) for process in lent] == [0, 0]
    assert not list(cleanup.MEMORY.glob(f"{launched.token}-host*"))


def test_hosts_are_given_an_address_of_a_launcher_that_listens_at_all_of_its_own(go: Launch) -> None:
    given = go(hosts=1, listen="0.0.0.0:0")._agent_config(0)
    assert given.supervisor.rpartition(":")[0] == own_address()


def test_what_a_killed_lent_host_leaves_is_swept(go: Launch, tmp_path: Path) -> None:
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
            found = b"".join(iter(lambda: sock.recv(4096), b""))
            assert len(found) in (0, ClientHandshake.ANSWER)  # at most a nonce and a proof that is of no use
    with pytest.raises(ConnectionError):
        handshake.connect(address, 10.0, Keys(b"some other secret"), service)


SLOW = """
import os, pathlib, time
first = pathlib.Path(os.environ["SLOW"])
if first.exists(): time.sleep(6.0)
first.touch()
"""


def test_ranks_are_not_late_while_the_fork_server_that_is_to_start_one_still_imports(
    go: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    env = {"PYTHONPATH": str(tmp_path), "SLOW": str(tmp_path / "imported")}
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
    go: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_strangers_read_forge_and_stop_nothing(go: Launch, tmp_path: Path) -> None:
    launched = go(hosts=2, listen="127.0.0.1:0")
    for given, sentence in (
        (None, "the secret of that job is needed"),
        ("some other secret", "does not know the job's secret"),
    ):
        told = CliRunner().invoke(app, ["host", launched._offer.address], env={VARIABLE: given})
        assert isinstance(told.exception, UserError) and sentence in str(told.exception)
    code = "import sys; from windtunnel.training.session import lend; lend(sys.argv[1], '', '')"
    lent = [
        subprocess.Popen([sys.executable, "-c", code, launched._offer.address], env=knowing(launched))
        for _ in range(2)
    ]
    here(launched, 1, 2)
    struck = [(launched._supervisor.address, "rpc"), (launched._offer.address, "rpc")]
    for joined in kinds(launched.events(), "host.joined"):
        struck.append((joined["memory"], f"memory {joined['memory']}"))
    (store,) = [event["address"] for event in kinds(launched.events(), "store")]
    struck.append((store, f"store {store}"))
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


def test_a_new_host_prints_where_the_first_did(go: Launch, tmp_path: Path) -> None:
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
