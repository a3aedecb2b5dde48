"""`load_cluster`: a name or a file becomes a `Cluster`.

A name is ``DEVICE:HOSTSxDEVICES`` from the catalogue, with what-ifs behind commas:
``h100-sxm:16x8,nic=ib-200,topology=fat-tree-2,oversubscription=4``. A file is YAML (see docs/cluster.md), and
takes the same what-ifs. Both are brought into one `ClusterSpec`, which is then filled in from the catalogue.
What the user gave wins; then the base; then the usual host and network of the device.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windtunnel.base.errors import UserError
from windtunnel.base.fields import suggest
from windtunnel.base.strict_yaml import read_yaml
from windtunnel.cluster import catalogue
from windtunnel.cluster.model import TORI, Cluster, Device, Host, Link, Multicast, Topology, TopologyKind
from windtunnel.cluster.schema import (
    ClusterSpec,
    DeviceSpec,
    LinkSpec,
    MulticastSpec,
    TopologySpec,
    check,
)

# What may stand behind a comma, and where it belongs in a file.
OPTIONS: dict[str, tuple[str, ...]] = {
    "nic": ("host", "nic"), "nics": ("host", "nics"), "intra": ("host", "intra"),
    "topology": ("topology", "kind"), "oversubscription": ("topology", "oversubscription"),
    "hosts_per_leaf": ("topology", "hosts_per_leaf"), "leaves_per_pod": ("topology", "leaves_per_pod"),
    "dims": ("topology", "dims"), "hop_latency": ("topology", "hop_latency"),
    "multicast": ("multicast", "kind"), "splitter": ("multicast", "splitter"),
    "planes": ("multicast", "planes"), "price": ("price_per_device_hour",),
}  # fmt: skip


def load_cluster(spec: str | Path) -> Cluster:
    """The cluster that ``spec`` names: ``h100-sxm:16x8`` or a YAML file, with or without ``,key=value``.

    Raises `UserError` with one sentence for anything that is not understood.
    """
    spec = str(spec).strip()
    if not spec:
        raise UserError(f"the cluster is empty, accepted is a YAML file or a name like {EXAMPLE}")
    head, *options = spec.split(",")
    if _is_file(head):
        document = read_yaml(Path(head), "cluster file", f"a YAML file or a name like {EXAMPLE}")
        name = check(document, head).name  # alone first: a what-if is not merged into what is malformed
        name = name or head
    else:
        document = {"base": head}
        name = head
    keys: set[str] = set()
    for option in options:
        key = _apply(document, option, spec)
        if key in keys:
            raise UserError(f"{spec}: option {key} is given twice, accepted is once")
        keys.add(key)
    document["name"] = ",".join([name, *options])
    return build(check(document, spec), spec)


def _is_file(head: str) -> bool:
    return "/" in head or head.endswith((".yaml", ".yml")) or (":" not in head and Path(head).is_file())


def _apply(document: dict[str, Any], option: str, spec: str) -> str:
    """Write ``key=value`` into the place of ``document`` that it belongs to; returns the key."""
    key, equals, value = option.partition("=")
    key = key.strip()
    if not equals or not value.strip():
        raise UserError(
            f"{spec}: option {option!r} is not understood, accepted is key=value, such as nic=ib-200"
        )
    if key not in OPTIONS:
        raise UserError(f"{spec}: option {key} is unknown{suggest(key, OPTIONS)}")
    *path, last = OPTIONS[key]
    for part in path:
        document[part] = document.get(part) or {}
        document = document[part]
    document[last] = value.strip()
    return key


# The NVLink generations whose switches reduce in the network.
NVLS_LINKS = ("nvlink-4", "nvlink-5")
EXAMPLE = "h100-sxm:16x8 (16 hosts of 8 devices)"


def build(spec: ClusterSpec, where: str) -> Cluster:
    """``spec`` filled in; ``where`` is the file or name that errors tell.

    Raises `UserError` for names that the catalogue has not, figures that are missing, and a torus or
    oversubscription that does not fit.
    """
    name, hosts, devices = _parse_base(spec.base, where) if spec.base is not None else (None, None, None)
    hosts, devices = spec.hosts or hosts, spec.host.devices or devices
    if spec.host.device is not None and spec.host.device.base is not None:
        name = spec.host.device.base
        if name not in catalogue.device_names():
            suggestion = suggest(name, catalogue.device_names())
            raise UserError(f"{where}: host.device is {name!r}{suggestion}, or a mapping of fields")
    if hosts is None or devices is None:
        field = "hosts" if hosts is None else "host.devices"
        raise UserError(f"{where}: {field} is missing, accepted is a whole number, or a base like {EXAMPLE}")

    usual: Host | None = None
    topology = Topology("single-switch", source="the default of a cluster file without a base")
    if name is not None:
        kind = catalogue.host_kind(name)
        usual, topology = usual_host(kind, devices), usual_topology(kind, devices)
    host = _host(spec, usual, devices, where)
    return Cluster(
        name=spec.name or where,
        host=host,
        hosts=hosts,
        topology=_topology(spec.topology, topology, host, hosts, where),
        price_per_device_hour=spec.price_per_device_hour,
        multicast=_multicast(spec.multicast, where),
    )


def _parse_base(base: str, where: str) -> tuple[str, int, int]:
    """``h100-sxm:16x8`` as device, hosts and devices of a host."""
    if not where.startswith(base):
        where = f"{where}: base is {base!r}"
    name, _, size = base.partition(":")
    names = catalogue.device_names()
    if name not in names:
        raise UserError(f"{where}: the catalogue has no device {name!r}{suggest(name, names)}")
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", size)
    if not match:
        raise UserError(f"{where}: the size is missing, accepted is {name}:HOSTSxDEVICES, such as {EXAMPLE}")
    hosts, devices = int(match[1]), int(match[2])
    if not 1 <= hosts <= catalogue.MAX_HOSTS:
        raise UserError(f"{where}: {hosts} hosts, accepted is 1 to {catalogue.MAX_HOSTS}")
    most = catalogue.max_devices(name)
    if not 1 <= devices <= most:
        raise UserError(f"{where}: {devices} devices in a host, accepted for {name} is 1 to {most}")
    return name, hosts, devices


def usual_host(kind: catalogue.HostKind, devices: int) -> Host:
    """The usual host cut to ``devices``: NICs and cores go with the devices, and so does a CPU's memory."""
    full = kind.host
    device = full.device
    if device.kind == "cpu":
        shared = f"{device.sources['memory_bytes']}, shared by {devices} ranks"
        device = replace(
            device,
            memory_bytes=device.memory_bytes / devices,
            sources=device.sources | {"memory_bytes": shared},
        )
    return replace(
        full, device=device, devices=devices, nics=max(1, full.nics * devices // full.devices),
        cpu_cores=max(1, full.cpu_cores * devices // full.devices),
        intra_hosts=kind.trays if devices <= kind.tray_devices else 1,
    )  # fmt: skip


def usual_topology(kind: catalogue.HostKind, devices: int) -> Topology:
    """The usual network; where trays stand for hosts, a leaf has as many more of them."""
    trays = kind.trays if devices <= kind.tray_devices else 1
    return replace(kind.topology, hosts_per_leaf=kind.topology.hosts_per_leaf * trays)


def _host(spec: ClusterSpec, usual: Host | None, devices: int, where: str) -> Host:
    host_spec = spec.host
    values: dict[str, Any] = {"devices": devices}
    values["device"] = _device(host_spec.device, usual.device if usual else None, where)
    for field in ("intra", "nic", "pcie"):
        values[field] = _link(getattr(host_spec, field), getattr(usual, field, None), f"host.{field}", where)
    defaults = {
        "intra_switched": False, "nvls": False, "intra_hosts": 1, "nics": devices, "cpu_cores": 8 * devices,
        "source": where,
    }  # fmt: skip
    for field, default in defaults.items():
        value = getattr(host_spec, field)
        values[field] = getattr(usual, field, default) if value is None else value
    if host_spec.nvls is None and values["intra"].name not in NVLS_LINKS:
        values["nvls"] = False  # a what-if with an older NVLink, or none, has no switch that reduces
    return Host(**values)


def _device(device_spec: DeviceSpec | None, usual: Device | None, where: str) -> Device:
    if device_spec is None:
        if usual is None:
            accepted = ", ".join(catalogue.device_names())
            raise UserError(
                f"{where}: host.device is missing, accepted are {accepted}, or a mapping of fields"
            )
        return usual
    changes = _changes(device_spec)
    origin = changes.pop("source", where)
    flops: dict[str, float] = changes.pop("peak_flops", {})
    sources = dict.fromkeys(changes, origin) | {f"peak_flops.{dtype}": origin for dtype in flops}
    if usual is not None:
        return replace(usual, **changes, peak_flops=usual.peak_flops | flops, sources=usual.sources | sources)
    changes = {
        "vendor": "unknown",
        "kind": "gpu",
        "capability": (9, 0),
        "power_watts": 0.0,
        "sustained": 1.0,
        "torch_name": changes.get("name"),
    } | changes
    needed = [field.name for field in fields(Device) if field.name not in ("peak_flops", "sources")]
    missing = next((field for field in needed if changes.get(field) is None), None)
    if missing is None and "float32" not in flops:
        missing = "peak_flops.float32"
    if missing:
        raise UserError(
            f"{where}: host.device.{missing} is missing, accepted is every figure of a device, or base: NAME"
        )
    return Device(**changes, peak_flops=flops, sources=sources)


def _link(link_spec: LinkSpec | None, usual: Link | None, field: str, where: str) -> Link:
    names = catalogue.link_names(network=field == "host.nic")
    if link_spec is None:
        if usual is None:
            accepted = ", ".join(names)
            raise UserError(f"{where}: {field} is missing, accepted are {accepted}, or a mapping of fields")
        return usual
    if link_spec.base is not None:
        if link_spec.base not in names:
            raise UserError(f"{where}: {field} is {link_spec.base!r}{suggest(link_spec.base, names)}")
        usual = catalogue.link(link_spec.base)
    changes = _changes(link_spec)
    if usual is None:
        missing = next((part for part in ("bandwidth", "latency") if part not in changes), None)
        if missing:
            raise UserError(f"{where}: {field}.{missing} is missing, accepted is a figure, or base: NAME")
        defaults: dict[str, Any] = {"name": field.partition(".")[2], "efficiency": 0.9, "source": where}
        return Link(**(defaults | changes))
    if changes:
        changes.setdefault("source", f"{where} ({', '.join(sorted(changes))}); else {usual.source}")
    return replace(usual, **changes)


def _topology(topology_spec: TopologySpec, usual: Topology, host: Host, hosts: int, where: str) -> Topology:
    changes = _changes(topology_spec)
    if changes:
        changes.setdefault("source", f"{where} ({', '.join(sorted(changes))})")
    latency = catalogue.hop_latency(host.nic.name)
    if latency is not None:
        changes.setdefault("hop_latency", latency)
    topology = replace(_leaves_for(usual, topology_spec.kind or usual.kind, host.nics), **changes)
    shape = "x".join(map(str, topology.dims))
    if topology.kind in TORI:
        if not topology.dims or math.prod(topology.dims) != hosts:
            raise UserError(
                f"{where}: topology.dims is {shape or 'missing'}, accepted for a torus of {hosts} hosts are "
                f"sizes whose product is {hosts}, such as {_near_square(hosts)}"
            )
    elif topology.dims:
        raise UserError(f"{where}: topology.dims is {shape}, accepted only where topology.kind is torus")
    if topology.kind in (*TORI, "single-switch") and topology.oversubscription != 1:
        raise UserError(
            f"{where}: topology.oversubscription is {topology.oversubscription:g}, accepted is 1, since a "
            f"{topology.kind} network has no uplinks"
        )
    return topology


def _multicast(multicast_spec: MulticastSpec, where: str) -> Multicast | None:
    changes = _changes(multicast_spec)
    if not changes:
        return None
    for field, accepted in (("kind", "shufflecast"), ("splitter", "how many outputs each one has")):
        if field not in changes:
            raise UserError(f"{where}: multicast.{field} is missing, accepted is {accepted}")
    return Multicast(changes["splitter"], changes.get("planes", 1))


def _leaves_for(usual: Topology, kind: TopologyKind, nics: int) -> Topology:
    """``usual`` rewired as ``kind`` with the same switches.

    A leaf with room for N NICs takes one NIC of N hosts in a rail-optimised network, but all NICs of fewer
    hosts in a fat tree.
    """
    rails_before, rails_after = usual.kind == "rail-optimised", kind == "rail-optimised"
    if rails_before and not rails_after:
        return replace(
            usual,
            hosts_per_leaf=max(1, usual.hosts_per_leaf // nics),
            leaves_per_pod=usual.leaves_per_pod * nics,
        )
    if rails_after and not rails_before:
        return replace(
            usual,
            hosts_per_leaf=usual.hosts_per_leaf * nics,
            leaves_per_pod=max(1, usual.leaves_per_pod // nics),
        )
    return usual


def _near_square(hosts: int) -> str:
    side = next(size for size in range(math.isqrt(hosts), 0, -1) if hosts % size == 0)
    return f"{side}x{hosts // side}"


def _changes(model: BaseModel) -> dict[str, Any]:
    """The fields that the user gave, without ``base``."""
    return {key: value for key, value in model if value is not None and key != "base"}
