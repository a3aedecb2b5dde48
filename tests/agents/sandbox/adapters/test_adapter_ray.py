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
    assert actor.call(None, "health").home == str(client.place.home)
    assert actor.call(None, "create", SandboxSpec("a")) == "a"
    assert actor.call("a", "run", "echo hi", timeout=60).stdout == b"hi\n"
    assert actor.call("a", "end_turn", "r") is None
    made = actor.call("a", "checkpoint")
    assert actor.call(None, "fork", made.id, 2) == ["a-1", "a-2"]
    assert set(actor.call(None, "notice", 9)) == {"a", "a-1", "a-2"}
    actor.call(None, "remove", "a")
    assert [one.name for one in actor.call(None, "boxes")] == ["a-1", "a-2"]
    for name, method in (("a-1", "_execute"), ("a-1", "fork"), (None, "down")):
        with pytest.raises(UserError, match="no method"):
            actor.call(name, method)


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
    assert made.get("a").call("info").status == "running"
    made.remove("a")
    made.close()
    assert len(client.boxes()) == 2  # sandboxes do not end with the actors
