"""A pool of hosts as Ray actors: sandboxes on the nodes of a Ray cluster.

Each node has one ``SandboxActor``, a client of that node's daemon. So an actor that dies loses nothing: the
daemon and its sandboxes run on, and the actor that Ray starts anew finds them. A sandbox stays on its node,
and so do its forks, because that is where its checkpoints are; ``Pool.move`` takes one to another node by an
export that both can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from windtunnel.agents.sandbox.model import BoxInfo, Manifest, SandboxSpec, Saved, TurnResult
from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox
from windtunnel.base.calls import methods
from windtunnel.base.errors import UserError

CONCURRENT = 256
"""Calls that one actor takes at a time: a command occupies one until it ends."""


class SandboxActor:
    """The sandboxes of one node. Plain Python: ``pool`` makes it a Ray actor."""

    def __init__(self, home: str | None = None) -> None:
        from windtunnel.agents.sandbox.client import connect

        self._client = connect(home)

    def call(self, name: str | None, method: str, *arguments: Any, **options: Any) -> Any:
        """A method of the sandbox ``name``, or of the host where that is None.

        A sandbox is answered by its name; of a checkpoint under way nothing is told.
        """
        known = (*methods(AnyHost), "health") if name is None else methods(AnySandbox)
        if method not in known:
            raise UserError(f"sandbox: {method!r} is no method of a sandbox in a pool")
        at: Any = self._client if name is None else self._client.get(name)
        answer = getattr(at, method)(*arguments, **options)
        if name is None and method in ("create", "get", "import_"):
            return answer.name
        if name is None and method == "fork":
            return [one.name for one in answer]
        return None if method == "end_turn" else answer


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
    remote = ray.remote(SandboxActor)
    actors = {
        node["NodeID"]: remote.options(
            num_cpus=0,
            max_concurrency=CONCURRENT,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(home)
        for node in chosen
    }
    try:
        ray.get([actor.call.remote(None, "health") for actor in actors.values()])
    except BaseException:
        for actor in actors.values():
            ray.kill(actor)
        raise
    return Pool(actors)


class Pool:
    """Sandboxes on several nodes. A new one goes to the node that runs the fewest."""

    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors

    @property
    def nodes(self) -> list[str]:
        return list(self._actors)

    def boxes(self) -> dict[str, list[BoxInfo]]:
        """The sandboxes of each node."""
        asked = {node: actor.call.remote(None, "boxes") for node, actor in self._actors.items()}
        return {node: _got(answer) for node, answer in asked.items()}

    def create(self, spec: SandboxSpec, *, node: str | None = None) -> PooledBox:
        """A new sandbox; its name must be free on all nodes."""
        known = self.boxes()
        for at, found in known.items():
            if any(one.name == spec.name for one in found):
                raise UserError(f"sandbox: {spec.name!r} exists already, on node {at}")
        if node is None:
            node = min(known, key=lambda at: sum(one.status == "running" for one in known[at]))
        self._host(node, "create", spec)
        return PooledBox(self._actors[node], spec.name, node)

    def get(self, name: str) -> PooledBox:
        """The sandbox of that name, on whichever node it is."""
        for node, found in self.boxes().items():
            if any(one.name == name for one in found):
                return PooledBox(self._actors[node], name, node)
        raise UserError(f"sandbox: {name!r} is unknown on all {len(self._actors)} nodes of the pool")

    def remove(self, name: str) -> None:
        self.get(name).remove()

    def move(self, name: str, node: str, url: str, *, allow_less: bool = False) -> PooledBox:
        """Take a sandbox to another node through ``url``, which both reach; it is removed where it was.

        Raises LessError where something would be left behind, unless ``allow_less``; it stays then.
        """
        self._known(node)
        source = self.get(name)
        if source.node == node:
            return source
        self._host(source.node, "export", name, url, allow_less=allow_less)
        self._host(node, "import_", url, name, allow_less=allow_less)
        source.remove()
        return PooledBox(self._actors[node], name, node)

    def notice(self, node: str, seconds: float) -> dict[str, Saved]:
        """A node will be taken: checkpoint all that runs there."""
        return dict(self._host(node, "notice", seconds))

    def close(self) -> None:
        """End the actors; daemons and sandboxes run on."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _host(self, node: str, method: str, *arguments: Any, **options: Any) -> Any:
        """A method of a node's host, and its answer."""
        self._known(node)
        return _got(self._actors[node].call.remote(None, method, *arguments, **options))

    def _known(self, node: str) -> None:
        if node not in self._actors:
            known = ", ".join(self._actors)
            raise UserError(f"sandbox: node {node!r} is not in the pool; there are: {known}")


class PooledBox:
    """One sandbox of a pool. Its methods are those of ``Box``; ``start`` gives a reference to wait for."""

    def __init__(self, actor: Any, name: str, node: str) -> None:
        self._actor, self.name, self.node = actor, name, node

    def start(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method without waiting: a Ray object reference."""
        return self._actor.call.remote(self.name, method, *arguments, **options)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of `AnySandbox` whose arguments are plain data, and wait for its answer."""
        return _got(self.start(method, *arguments, **options))

    def run(
        self, command: str | Sequence[str], *, shell: str = "main", timeout: float | None = None
    ) -> TurnResult:
        result: TurnResult = self.call("run", command, shell=shell, timeout=timeout)
        return result

    def end_turn(self, request: str = "") -> None:
        """End the turn; its checkpoint goes on while the model thinks."""
        self.call("end_turn", request)

    def checkpoint(self, label: str = "", *, full: bool = False, allow_less: bool = False) -> Manifest:
        made: Manifest = self.call("checkpoint", label, full=full, allow_less=allow_less)
        return made

    def fork(
        self,
        count: int = 1,
        *,
        names: list[str] | None = None,
        allow_less: bool = False,
    ) -> list[PooledBox]:
        """Sandboxes that go on from its state now, on the same node."""
        options = {"names": names, "allow_less": allow_less}
        made = _got(self._actor.call.remote(None, "fork", self.name, count, **options))
        return [PooledBox(self._actor, name, self.node) for name in made]

    def remove(self) -> None:
        _got(self._actor.call.remote(None, "remove", self.name))


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
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from None
        raise
