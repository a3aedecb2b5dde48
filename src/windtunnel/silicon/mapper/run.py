"""The ways in: layers mapped, memories sized, a captured run made into a device. Each is kept as a run, with
the decisions that it took."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.fields import suggest
from windtunnel.calibration import profiles
from windtunnel.cluster.catalogue import link_names
from windtunnel.silicon.mapper.captured import nests
from windtunnel.silicon.mapper.model import Accelerator, Layer
from windtunnel.silicon.mapper.policy import POLICIES, Decision, Observation, allocation
from windtunnel.silicon.mapper.twin import MappingCost, price, stream, total
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store, StoredRun

CAPABILITY = "silicon.mapper"
EMULATE = "training.emulate"
OPERATORS, VERSION = "operators.json", 1  # what an emulation leaves in the folder of its run
Decide = Callable[[Observation], Decision]


@dataclass(frozen=True)
class Mapped:
    """A layer with its mapping, and what that takes."""

    layer: Layer
    decision: Decision
    cost: MappingCost


@dataclass(frozen=True)
class MappedDevice:
    """A run's step on an accelerator: ``kinds`` has what a rank's operators take, by kind, in the mean of all
    ranks; ``cluster`` and ``profile`` are the files that were written."""

    kinds: dict[str, MappingCost]
    step: MappingCost
    cluster: Path
    profile: Path


@contextmanager
def _recorded(policy: str, **inputs: Any) -> Iterator[tuple[StoredRun, Decide]]:
    """A run, and the policy of that name, each decision of which is taken once and written down."""
    if policy not in POLICIES:
        raise UserError(f"`policy`: {policy!r} is unknown, accepted are {', '.join(POLICIES)}")
    run = Store.open().begin(CAPABILITY, {"policy": policy, **inputs})
    log = EventLog(run.directory / NAME)

    @cache
    def decide(observation: Observation) -> Decision:
        decision = POLICIES[policy](observation)
        log.decision(CAPABILITY, policy, observation, decision)
        return decision

    with run.failing(), closing(log):
        yield run, decide


def search(
    layers: Sequence[Layer], accelerator: Accelerator, dataflow: str = "", policy: str = "energy"
) -> list[Mapped]:
    """Map each layer, unrolled as ``dataflow`` says, such as C|K; in the best way where it says nothing.
    Raises `UserError`: no such policy or dataflow, or a layer that does not fit."""
    names, rows = [layer.name for layer in layers], []
    with _recorded(policy, layers=names, accelerator=accelerator.name, dataflow=dataflow) as (run, decide):
        for layer in layers:
            observation = Observation(layer, accelerator, dataflow)
            decision = decide(observation)
            rows.append(Mapped(layer, decision, price(observation, decision)))
        run.finish(asdict(total(row.cost for row in rows)))
    return rows


def allocate(layers: Sequence[Layer], accelerator: Accelerator, dataflow: str = "") -> allocation.Allocation:
    """Size the memories for all layers together. Raises as `search`, or since no level can be resized."""
    names = [layer.name for layer in layers]
    with _recorded("energy", layers=names, accelerator=accelerator.name, dataflow=dataflow) as (run, decide):
        result = allocation.allocate(layers, accelerator, dataflow, decide)
        run.finish({"energy_gain": result.gain, "joules": result.best.energy})
    return result


def profile(run_id: str, accelerator: Accelerator, out: Path, policy: str = "fastest") -> MappedDevice:
    """Price each operator of an emulated run on ``accelerator``, and write the device that results: a profile
    among the user's own, and in ``out`` a cluster like the run's with the accelerator as its device. Raises
    `UserError`: no such run, or it is none of an emulation; a layer that does not fit; no place to write."""
    store, name = Store.open(), f"{accelerator.name}-drawn"  # no device of the catalogue, or measured, is
    newest = store.newest(EMULATE, lambda run: True) if run_id == "last" else None  # not one of these here
    source = newest or store.get(run_id)
    path, summary = source.directory / OPERATORS, source.summary
    if summary is None or not path.is_file():
        what = f"run {source.id} of {source.capability} has no {OPERATORS}"
        raise UserError(f"{run_id}: {what}, accepted are runs of `windtunnel emulate` that are done")
    content = profiles.read(path, "the operators of a run", VERSION, dict)
    if not content["operators"]:
        raise UserError(f"run {source.id}: its step has no operators, accepted is a step that computes")
    cluster = {"name": name, **_cluster(summary["cluster"], accelerator, name)}
    rows, spent = [], dict[str, list[MappingCost]]()
    with _recorded(policy, of=source.id, accelerator=accelerator.name) as (run, decide):
        for row in content["operators"]:
            cost, facts = _operator(row, accelerator, decide), row[3]
            rows.append([*row[:3], cost.seconds, cost.joules])
            calls = facts["count"] * facts["ranks"] / content["period"] / summary["world_size"]
            spent.setdefault(facts["kind"], []).append(cost.times(calls))
        kinds = {kind: total(costs) for kind, costs in spent.items()}
        device = MappedDevice(kinds, total(kinds.values()), out, profiles.own(name))
        origin = {"origin": f"modelled by windtunnel mapper, operators of run {source.id}"}
        head = {"device": name, "provenance": origin, "host_overhead": {}, "collectives": []}
        try:
            atomic.replace(out, yaml.safe_dump(cluster, sort_keys=False))
            profiles.save(device.profile, VERSION, head, ("operators", rows))
        except OSError as error:
            raise UserError(
                f"`out`: {out} or {device.profile} cannot be written ({error.strerror})"
            ) from error
        run.finish(asdict(device.step))
    return device


def _operator(row: Sequence[Any], accelerator: Accelerator, decide: Decide) -> MappingCost:
    """One call."""
    parts = []
    for layer, times in nests(row):
        observation = Observation(layer, accelerator)
        parts.append(price(observation, decide(observation)).times(times))
    return total(parts) if parts else stream(accelerator, row[3]["bytes"])


def _cluster(was: dict[str, Any], accelerator: Accelerator, name: str) -> dict[str, Any]:
    """A cluster file like that of ``was`` (of a summary), with the accelerator as its device."""
    links = {field: was[field] for field in ("nic", "intra")}
    for field, link in links.items():
        if link not in link_names():
            raise UserError(f"the run's {field} is {link!r}{suggest(link, link_names())}")
    memory, pes = accelerator.levels[-1], accelerator.array[0] * accelerator.array[1]
    if memory.capacity is None or memory.bandwidth is None:
        raise UserError(f"{accelerator.name}: {memory.name} has no capacity or bandwidth, accepted are both")
    buffers = [int(level.capacity or 0) for level in accelerator.levels[accelerator.inner : -1]]
    device = {
        "name": name, "torch_name": name, "kind": "gpu", "sm_count": pes, "memory_bytes": memory.capacity,
        "memory_bandwidth": memory.bandwidth, "l2_bytes": max(buffers, default=0), "source": "a drawing",
        "peak_flops": dict.fromkeys(("float32", "bfloat16", "float16"), 2.0 * pes * accelerator.clock),
    }  # fmt: skip
    host = {"devices": was["devices_per_host"], "device": device, **links, "pcie": "pcie-5"}
    return {"hosts": was["hosts"], "host": host}
