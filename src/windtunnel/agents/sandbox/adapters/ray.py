"""A pool of hosts as Ray actors: sandboxes on the nodes of a Ray cluster.

Each node has one ``SandboxActor``, a client of that node's daemon. So an actor that dies loses nothing: the
daemon and its sandboxes run on, and the actor that Ray starts anew finds them. A sandbox stays on its node,
and so do its forks, because that is where its checkpoints are; ``Pool.move`` takes one to another node by an
export that both can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from windtunnel.agents.sandbox.model import BoxInfo, SandboxSpec, Saved
from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox
from windtunnel.base.calls import method, methods, referred
from windtunnel.base.errors import UserError
from windtunnel.base.remote import forwards

if TYPE_CHECKING:  # it has the same methods, which type checkers read there
    from windtunnel.agents.sandbox.box import Box as _Box
else:
    _Box = object

CONCURRENT = 256
"""Calls that one actor takes at a time: a command occupies one until it ends."""
KINDS = {kind.__name__: kind for kind in (AnyDaemon, AnyHost, AnySandbox)}


class SandboxActor:
    """The sandboxes of one node. Plain Python: ``pool`` makes it a Ray actor."""

    def __init__(self, home: str | None = None) -> None:
        from windtunnel.agents.sandbox.client import connect

        self._client = connect(home)

    def call(self, kind: str, name: str, on: str, *arguments: Any, **options: Any) -> Any:
        """A method of the sandbox ``on``, or of the host.

        A sandbox is answered by its name; of a checkpoint under way nothing is told.
        """
        if name not in methods(KINDS[kind]) or name == "down":
            raise UserError(f"sandbox: {name!r} is no method of a sandbox in a pool")
        answer = getattr(self._client.get(on) if on else self._client, name)(*arguments, **options)
        boxes, several = referred(method(KINDS[kind], name).returns, (AnySandbox,))
        if boxes is not None:
            return [box.name for box in answer] if several else answer.name
        return None if name == "end_turn" else answer


class _Link:
    """Calls to one actor, as `windtunnel.base.remote` makes them."""

    def __init__(self, actor: Any, node: str) -> None:
        self.actor, self.node = actor, node

    def start(self, protocol: type, name: str, on: str, *arguments: Any, **options: Any) -> Any:
        return self.actor.call.remote(protocol.__name__, name, on, *arguments, **options)

    def call(self, protocol: type, name: str, on: str, *arguments: Any, **options: Any) -> Any:
        return _got(self.start(protocol, name, on, *arguments, **options))


def pool(hosts: Sequence[str] | None = None, *, home: str | None = None) -> Pool:
    """A pool over Ray nodes: those whose ids or addresses are given, or all that live.

    ``ray.init`` has been called, or is called here. Raises UserError where Ray is missing or a node is.
    """
    if find_spec("ray") is None:
        raise UserError("sandbox: Ray is missing; pip install 'windtunnel[ray]'")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        ray.init()
    alive = [node for node in ray.nodes() if node["Alive"]]
    chosen = alive if hosts is None else [_node(alive, host) for host in hosts]
    links = [
        _Link(
            ray.remote(SandboxActor).options(
                num_cpus=0, max_concurrency=CONCURRENT, max_restarts=-1, max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(home),
            node["NodeID"],
        )
        for node in chosen
    ]  # fmt: skip
    joined = Pool(links)
    try:
        ray.get([link.start(AnyDaemon, "health", "") for link in links])
    except BaseException:
        joined.close()
        raise
    return joined


class Pool:
    """Sandboxes on several nodes. A new one goes to the node that runs the fewest."""

    def __init__(self, links: Sequence[_Link]) -> None:
        self._links = {link.node: link for link in links}

    @property
    def nodes(self) -> list[str]:
        return list(self._links)

    def boxes(self) -> dict[str, list[BoxInfo]]:
        """The sandboxes of each node."""
        begun = {node: link.start(AnyHost, "boxes", "") for node, link in self._links.items()}
        return {node: _got(answer) for node, answer in begun.items()}

    def create(self, spec: SandboxSpec, *, node: str | None = None) -> PooledBox:
        """A new sandbox; its name must be free on all nodes."""
        known = self.boxes()
        for at, boxes in known.items():
            if any(box.name == spec.name for box in boxes):
                raise UserError(f"sandbox: {spec.name!r} exists already, on node {at}")
        if node is None:
            node = min(known, key=lambda at: sum(box.status == "running" for box in known[at]))
        link = self._link(node)
        return PooledBox(link, link.call(AnyHost, "create", "", spec))

    def get(self, name: str) -> PooledBox:
        """The sandbox of that name, on whichever node it is."""
        for node, boxes in self.boxes().items():
            if any(box.name == name for box in boxes):
                return PooledBox(self._links[node], name)
        raise UserError(f"sandbox: {name!r} is unknown on all {len(self._links)} nodes of the pool")

    def remove(self, name: str) -> None:
        self.get(name).remove()

    def move(self, name: str, node: str, url: str, **options: Any) -> PooledBox:
        """Take a sandbox to another node through ``url``, which both reach; it is removed where it was.
        ``options``: of the host's ``export`` and ``import_``. It stays where one of these raises LessError.
        """
        there, source = self._link(node), self.get(name)
        if source.node == node:
            return source
        source.link.call(AnyHost, "export", "", name, url, **options)
        there.call(AnyHost, "import_", "", url, name, **options)
        source.remove()
        return PooledBox(there, name)

    def notice(self, node: str, seconds: float) -> dict[str, Saved]:
        """A node will be taken: checkpoint all that runs there."""
        return dict(self._link(node).call(AnyHost, "notice", "", seconds))

    def close(self) -> None:
        """End the actors; daemons and sandboxes run on."""
        import ray

        for link in self._links.values():
            ray.kill(link.actor)

    def _link(self, node: str) -> _Link:
        if node not in self._links:
            known = ", ".join(self._links)
            raise UserError(f"sandbox: node {node!r} is not in the pool; there are: {known}")
        return self._links[node]


@forwards(AnySandbox)
class PooledBox(_Box):
    """One sandbox of a pool. Its methods are those of ``Box`` with arguments that are plain data."""

    def __init__(self, link: _Link, name: str) -> None:
        self._link, self._on, self.link, self.node = link, name, link, link.node

    @property
    def name(self) -> str:
        return self._on

    def start(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method without waiting: a Ray object reference."""
        return self.link.start(AnySandbox, name, self._on, *arguments, **options)

    def fork(self, count: int = 1, **options: Any) -> list[PooledBox]:
        """Sandboxes that go on from its state now, on the same node. ``options``: of the host's ``fork``."""
        names = self.link.call(AnyHost, "fork", "", self._on, count, **options)
        return [PooledBox(self.link, name) for name in names]

    def remove(self) -> None:
        self.link.call(AnyHost, "remove", "", self._on)


def _node(alive: list[dict[str, Any]], host: str) -> dict[str, Any]:
    for node in alive:
        if host in (node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]):
            return node
    known = ", ".join(str(node["NodeManagerAddress"]) for node in alive) or "none"
    raise UserError(f"sandbox: Ray has no live node {host!r}; there are: {known}")


def _got(reference: Any) -> Any:
    """The answer; an error is raised as what it was on the node, not as Ray's."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise
