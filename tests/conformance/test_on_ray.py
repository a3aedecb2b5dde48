"""Hosts and workers on Ray's own cluster of several nodes in one computer, some of which are lost."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import until
from training.host_helpers import STAYS, environment, script
from windtunnel.base.errors import UserError
from windtunnel.linux.hosts import ActorLost, RayCluster
from windtunnel.store import eventlog
from windtunnel.training import launch as training
from windtunnel.training.launch import Launched

ray = pytest.importorskip("ray", reason="needs ray (extra ray)")
CLIENTS = free_port()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three nodes of two cores, beside a head that has none, with a server for clients."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 0, "ray_client_server_port": CLIENTS}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(3):
            cluster.add_node(num_cpus=2)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def of(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / eventlog.NAME
    return [event for event in eventlog.read(path) if event["kind"] == kind] if path.exists() else []


def here(folder: Path, generation: int, ranks: int = 2) -> dict[int, int]:
    """The processes of the ranks, once all are in that generation."""

    def there() -> dict[int, int]:
        return {
            event["rank"]: event["pid"] for event in of(folder, "here") if event["generation"] == generation
        }

    until(lambda: len(there()) == ranks)
    return there()


def named() -> list[Any]:
    return list(ray.util.list_named_actors(all_namespaces=True))


def test_a_job_outlives_a_node(nodes: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"hosts": 2, "preload": ("json",), "on": "ray"}
    with training.launch(script(tmp_path, STAYS), folder=folder, **options) as launched:
        here(folder, 1)
        joined = of(folder, "host.joined")
        assert len({event["domain"] for event in joined}) == 2  # two nodes
        lost = next(node for node in nodes.list_all_nodes() if node.node_id == joined[1]["domain"])
        nodes.remove_node(lost, allow_graceful=False)
        here(folder, 2)
        assert len(of(folder, "host.joined")) == 3
        (folder / "stop").touch()
        outcome = launched.wait(60)
        assert outcome is not None and outcome.status == 0, outcome
    assert not ray.is_initialized()
    nodes.add_node(num_cpus=2)
    with RayCluster("ray"):
        until(lambda: not named())


LAUNCHER = """
import sys
from pathlib import Path
from string import Template
from windtunnel.training.launch import launch
launch(sys.argv[1], hosts=2, preload=("json",), on="ray", folder=Path(sys.argv[2])).wait()
"""


def test_hosts_outlive_a_launcher(nodes: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", LAUNCHER, str(script(tmp_path, STAYS)), str(folder)]
    first = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    before = here(folder, 1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with training.resume(folder) as launched:
        assert isinstance(launched, Launched)
        until(lambda: len(of(folder, "started")) == 2)
        (folder / "stop").touch()
        outcome = launched.wait(60)
        assert outcome is not None and outcome.status == 0, outcome
    assert here(folder, 1) == before  # the same processes, to the end
    assert not [event for event in of(folder, "here") if event["generation"] > 1]
    with RayCluster("ray"):
        until(lambda: not named())


def test_what_a_host_refuses_ends_the_job(nodes: Any, tmp_path: Path) -> None:
    """The script goes away before the first host asks for it."""
    folder, path = tmp_path / "run", script(tmp_path, STAYS)
    with training.launch(path, folder=folder, hosts=1, preload=("json",), on="ray") as launched:
        path.unlink()
        outcome = launched.wait(60)
    assert outcome is not None and outcome.status == 1
    assert "no such file on this host" in outcome.reason


def test_workers_of_ingest_are_actors(nodes: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "ingest", "demo"]
    command += ["--on", "ray", "--seconds", "2", "--rows", "8192", "--workers", "1", "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exactly_once"]


def client() -> RayCluster | None:
    """Ray's proxy at times cannot start its server for a client: it forks while gRPC is at work."""
    with contextlib.suppress(UserError):
        return RayCluster(f"ray://127.0.0.1:{CLIENTS}", namespace="client")
    return None


def test_a_client_has_actors_on_nodes_of_their_own(nodes: Any) -> None:
    with until(client) as cluster:
        assert cluster.total("CPU") >= 4
        places = cluster.places(2)
        actors = [
            cluster.actor(Template, "$x", restarts=True, name=f"actor-{number}", place=place)
            for number, place in enumerate(places)
        ]
        calls = [actor.call("substitute", {"x": number}) for number, actor in enumerate(actors)]
        assert cluster.first(calls).done
        assert [call.result(60) for call in calls] == ["0", "1"]
        with pytest.raises(KeyError):
            actors[0].call("substitute", {}).result(60)
        actors[0].kill()
        with pytest.raises(ActorLost):
            actors[0].call("substitute", {"x": 1}).result(60)
        actors[1].kill()
        cluster.release()
