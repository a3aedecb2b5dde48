"""The Ray adapter: in words without Ray, and on a real local Ray where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from windtunnel.agents.sandbox.adapters.ray import SandboxActor, pool
from windtunnel.agents.sandbox.client import Client
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_sentence_says_what_to_install() -> None:
    with pytest.raises(UserError, match="Ray is missing"):
        pool()


def test_an_actor_serves_its_node(client: Client) -> None:
    actor = SandboxActor(str(client.place.home))
    assert actor.call("AnyDaemon", "health", "").home == str(client.place.home)
    assert actor.call("AnyHost", "create", "", SandboxSpec("a")) == "a"
    assert actor.call("AnySandbox", "run", "a", "echo hi", timeout=60).stdout == b"hi\n"
    assert actor.call("AnySandbox", "end_turn", "a", "r") is None
    made = actor.call("AnySandbox", "checkpoint", "a")
    assert actor.call("AnyHost", "fork", "", made.id, 2) == ["a-1", "a-2"]
    assert set(actor.call("AnyHost", "notice", "", 9)) == {"a", "a-1", "a-2"}
    actor.call("AnyHost", "remove", "", "a")
    assert [one.name for one in actor.call("AnyHost", "boxes", "")] == ["a-1", "a-2"]
    for kind, method in (("AnySandbox", "_execute"), ("AnySandbox", "fork"), ("AnyDaemon", "down")):
        with pytest.raises(UserError, match="no method"):
            actor.call(kind, method, "a-1")


@pytest.fixture
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray", reason="needs Ray")
    found.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield found
    found.shutdown()


@pytest.mark.slow
def test_a_pool_on_a_real_ray(ray: Any, client: Client) -> None:
    made = pool(home=str(client.place.home))
    box = made.create(SandboxSpec("a"))
    assert box.node in made.nodes
    assert box.run("echo hi").stdout == b"hi\n"
    box.end_turn()
    box.checkpoint("x")
    forks = box.fork(2)
    references = [one.start("run", "echo $((6 * 7))") for one in forks]
    assert [result.stdout for result in ray.get(references)] == [b"42\n", b"42\n"]
    with pytest.raises(UserError, match="exists already"):
        made.create(SandboxSpec("a"))
    with pytest.raises(UserError, match="unknown"):
        made.get("nope")
    with pytest.raises(UserError, match="no live node"):
        pool(["nowhere"])
    with pytest.raises(UserError, match="not in the pool"):
        made.create(SandboxSpec("b"), node="nowhere")
    assert made.get("a").info().status == "running"
    made.remove("a")
    made.close()
    assert len(client.boxes()) == 2  # sandboxes do not end with the actors
