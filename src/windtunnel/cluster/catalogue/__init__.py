"""The hardware catalogue: devices, links and hosts as YAML data, each figure with its source beside it.

``devices.yaml``, ``links.yaml`` and ``hosts.yaml`` hold the figures; this module turns them into the types of
`windtunnel.cluster.model`. A pair ``[value, source]`` names a source that is spelled out at the end of its
file; a source that begins with "inference" is our estimate and not a published figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from windtunnel.cluster.model import Device, Host, Link, Topology, TopologyKind

MAX_HOSTS = 100_000


@cache
def _read(file: str) -> dict[str, Any]:
    text = files(__name__).joinpath(file).read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


@dataclass(frozen=True)
class HostKind:
    """The full host that a device is usually built into, and its usual network.

    ``tray_devices`` and ``trays``: a full host may also be taken as that many small hosts that share its
    NVLink switch (0 where it cannot).
    """

    host: Host
    topology: Topology
    tray_devices: int
    trays: int


def device_names() -> list[str]:
    """Every device of the catalogue, ``cpu`` last."""
    return [*_read("devices.yaml")["devices"], "cpu"]


def link_names(network: bool | None = None) -> list[str]:
    """Every link of the catalogue; only those between hosts, or inside them, where ``network`` says which."""
    names: list[str] = list(_read("links.yaml")["links"])
    return [name for name in names if network is None or (hop_latency(name) is not None) == network]


@cache
def device(name: str) -> Device:
    """The device called ``name``; ``cpu`` is measured on this machine. KeyError for an unknown name."""
    if name == "cpu":
        # The one entry that costs time, so it is reached only when it is asked for.
        from windtunnel.cluster.cpu import measured_cpu

        return measured_cpu()
    document = _read("devices.yaml")
    entry = dict(document["devices"][name])
    cited = document["sources"]
    peaks = {dtype: float(value) for dtype, (value, _) in entry.pop("peak_flops").items()}
    sources = {
        f"peak_flops.{dtype}": cited[source]
        for dtype, (_, source) in document["devices"][name]["peak_flops"].items()
    }
    vendor, kind = entry.pop("vendor"), entry.pop("kind")
    values = {key: value for key, (value, _) in entry.items()}
    sources = {key: cited[source] for key, (_, source) in entry.items()} | sources
    major, minor = values["capability"]
    return Device(
        name=name,
        vendor=vendor,
        kind=kind,
        torch_name=values["torch_name"],
        capability=(major, minor),
        sm_count=int(values["sm_count"]),
        memory_bytes=float(values["memory_bytes"]),
        memory_bandwidth=float(values["memory_bandwidth"]),
        l2_bytes=int(values["l2_bytes"]),
        power_watts=float(values["power_watts"]),
        sustained=float(values["sustained"]),
        peak_flops=peaks,
        sources=sources,
    )


@cache
def link(name: str) -> Link:
    """The link called ``name``. Raises KeyError for an unknown name."""
    document = _read("links.yaml")
    entry = document["links"][name]
    cited = document["sources"]
    figures = ("bandwidth", "latency", "efficiency")
    return Link(
        name=name,
        bandwidth=float(entry["bandwidth"][0]),
        latency=float(entry["latency"][0]),
        efficiency=float(entry["efficiency"][0]),
        source="; ".join(f"{figure}: {cited[entry[figure][1]]}" for figure in figures),
    )


def hop_latency(nic: str) -> float | None:
    """Seconds that each switch of ``nic``'s kind of network adds; None for a link that is not a network."""
    entry = _read("links.yaml")["links"].get(nic, {})
    return float(entry["hop_latency"][0]) if "hop_latency" in entry else None


@cache
def host_kind(name: str) -> HostKind:
    """The usual host and network of the device called ``name``. Raises KeyError for an unknown name."""
    document = _read("hosts.yaml")
    entry = document["hosts"][name]
    kind: TopologyKind = entry["topology"]
    source = document["sources"][entry["source"]]
    host = Host(
        device=device(name),
        devices=entry["devices"],
        intra=link(entry["intra"]),
        intra_switched=entry["intra_switched"],
        nvls=entry["nvls"],
        nic=link(entry["nic"]),
        nics=entry["nics"],
        pcie=link(entry["pcie"]),
        cpu_cores=entry["cpu_cores"],
        source=source,
    )
    topology = Topology(
        kind=kind,
        hosts_per_leaf=entry["hosts_per_leaf"],
        leaves_per_pod=entry["leaves_per_pod"],
        hop_latency=hop_latency(entry["nic"]) or 0.0,
        source=source,
    )
    return HostKind(host, topology, entry.get("tray_devices", 0), entry.get("trays", 0))


def max_devices(name: str) -> int:
    """How many devices the usual host of ``name`` has at most, without measuring anything."""
    return int(_read("hosts.yaml")["hosts"][name]["devices"])
