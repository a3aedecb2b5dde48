"""Jobs to try schedules on, and the hosts and links they need: MapReduce, layer-wise training, random graphs.

Hosts are numbered; ``h3`` is the processors of one, ``h3.out`` and ``h3.in`` its NIC. Behind the NICs nothing
is full. Jobs of one list may share hosts, and that is where their order matters.
"""

from __future__ import annotations

import numpy as np

from windtunnel.network.dag.policy import GraphJob, GraphTask

NIC = 1.25e9
"""Bytes/s: 10 Gb/s."""


def hosts(count: int, processors: int = 1, nic: float = NIC) -> dict[str, float]:
    """The resources of so many hosts."""
    resources = {f"h{k}": float(processors) for k in range(count)}
    return resources | {f"h{k}.{way}": nic for k in range(count) for way in ("out", "in")}


def compute(name: str, host: int, seconds: float, after: tuple[str, ...] = ()) -> GraphTask:
    """A computing task on a host."""
    return GraphTask(name, "compute", seconds, ((f"h{host}", 1.0),), after)


def send(
    name: str, source: int, destination: int, nbytes: float, after: tuple[str, ...], coflow: str = ""
) -> GraphTask:
    """A transfer from host to host."""
    loads = ((f"h{source}.out", 1.0), (f"h{destination}.in", 1.0))
    return GraphTask(name, "network", nbytes, loads, after, coflow=coflow)


def mapreduce(
    name: str, rng: np.random.Generator, *, hosts: int, maps: int = 4, reduces: int = 3,
    seconds: float = 4.0, nbytes: float = 1e9, begins: float = 0.0,
) -> GraphJob:  # fmt: skip
    """Maps on random hosts, a shuffle from each to each reduce (one coflow), and reduces; sizes vary by
    a factor of up to two either way, and reducers are skewed."""
    where, to = rng.integers(hosts, size=maps), rng.integers(hosts, size=reduces)
    tasks = [compute(f"map{k}", int(where[k]), seconds * _about(rng)) for k in range(maps)]
    parts = rng.dirichlet(np.full(reduces, 2.0))
    gates: dict[int, list[str]] = {r: [] for r in range(reduces)}
    for r in range(reduces):
        for k in range(maps):
            if where[k] == to[r]:
                gates[r].append(f"map{k}")  # what stays on its host is not sent
                continue
            size = nbytes * reduces * parts[r]
            task = send(f"shuffle{k}-{r}", int(where[k]), int(to[r]), size, (f"map{k}",), "shuffle")
            tasks.append(task)
            gates[r].append(task.name)
    tasks += [
        compute(f"reduce{r}", int(to[r]), seconds * reduces * parts[r] * _about(rng), tuple(gates[r]))
        for r in range(reduces)
    ]
    return GraphJob(name, tuple(tasks), begins)


def training(
    name: str, workers: tuple[int, ...], layers: int = 6, iterations: int = 2, *, forward: float = 0.05,
    nbytes: float = 25e6, first: float = 1.0, begins: float = 0.0,
) -> GraphJob:  # fmt: skip
    """Data-parallel training, layer by layer: backward from the last layer, an all-reduce of a layer's
    gradients (one task that loads all workers' NICs as a ring does) as soon as all have them, and the next
    forward pass waits at each layer for that layer's. ``nbytes`` a layer, the last one's times ``first`` as
    many as the first one's, in even steps. Backward takes twice ``forward``, seconds of a layer."""
    ring = 2.0 * (len(workers) - 1) / len(workers)
    loads = tuple((f"h{host}.{way}", ring) for host in workers for way in ("out", "in"))
    tasks: list[GraphTask] = []
    before: dict[int, tuple[str, ...]] = dict.fromkeys(workers, ())
    for k in range(iterations + 1):
        for layer in range(layers):
            for host in workers:
                after = before[host] + ((f"reduce{k - 1}.{layer}",) if k else ())
                tasks.append(compute(f"forward{k}.{layer}@{host}", host, forward, after))
                before[host] = (tasks[-1].name,)
        if k == iterations:
            break
        for layer in reversed(range(layers)):
            for host in workers:
                tasks.append(compute(f"backward{k}.{layer}@{host}", host, 2 * forward, before[host]))
                before[host] = (tasks[-1].name,)
            size = nbytes * (1.0 + (first - 1.0) * layer / max(1, layers - 1))
            gates = tuple(f"backward{k}.{layer}@{host}" for host in workers)
            tasks.append(GraphTask(f"reduce{k}.{layer}", "network", size, loads, gates))
    return GraphJob(name, tuple(tasks), begins)


def random_graph(
    name: str, rng: np.random.Generator, *, hosts: int, tasks: int = 8, degree: float = 1.5,
    seconds: float = 1.0, begins: float = 0.0, whole: bool = False,
) -> GraphJob:  # fmt: skip
    """Computing tasks on random hosts, each after some ``degree`` earlier ones, what lies on another host
    sent first; about ``seconds`` each on average, of sending at a full NIC too. ``whole``: whole seconds."""
    where = rng.integers(hosts, size=tasks)
    graph_tasks: list[GraphTask] = []

    def size() -> float:
        drawn = seconds * rng.exponential()
        return float(max(1.0, round(drawn))) if whole else float(drawn + 0.05 * seconds)

    for k in range(tasks):
        count = min(k, int(rng.poisson(degree)))
        gates = []
        for j in sorted(rng.choice(k, count, replace=False).tolist() if count else []):
            gates.append(f"t{j}")
            if where[j] != where[k]:
                gates[-1] = f"t{j}-t{k}"
                graph_tasks.append(
                    send(gates[-1], int(where[j]), int(where[k]), NIC * size(), (f"t{j}",), f"to{k}")
                )
        graph_tasks.append(compute(f"t{k}", int(where[k]), size(), tuple(gates)))
    return GraphJob(name, tuple(graph_tasks), begins)


def _about(rng: np.random.Generator) -> float:
    return float(np.exp2(rng.uniform(-1.0, 1.0)))
