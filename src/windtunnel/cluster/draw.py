"""A cluster as a picture of text, and its figures as rows for tables.

The picture is a stack: the switch layers from the top down, then one host with its devices and NICs. Each
line between two layers tells what it carries, in one direction.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from windtunnel.cluster.model import TORI, Cluster, GroupPlacement, Link

WIDTH = 76


def si(value: float, unit: str) -> str:
    """``value`` with a decimal prefix: ``si(3.35e12, "B/s")`` is ``3.35 TB/s``."""
    if value == 0:
        return f"0 {unit}"
    prefixes = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
    power = min(15, max(-9, 3 * math.floor(math.log10(abs(value)) / 3)))
    return f"{value / 10**power:.4g} {prefixes[power]}{unit}"


def picture(cluster: Cluster) -> str:
    """The cluster drawn with box characters, `WIDTH` columns wide, newline-separated."""
    host, topology = cluster.host, cluster.topology
    plural = "s" if cluster.hosts > 1 else ""
    devices = f"{cluster.world_size:,} x {host.device.name}"
    lines = [f"{cluster.name}: {devices}, {cluster.hosts:,} host{plural} of {host.devices}"]
    if cluster.hosts > 1:
        lines += _torus_lines(cluster) if topology.kind in TORI else _switch_lines(cluster)
        if cluster.multicast is not None:
            splitter, planes = cluster.multicast.splitter, cluster.multicast.planes
            lines += _wire(f"and a shuffle of splitters 1:{splitter} for multicasts, planes: {planes}")
    return "\n".join(lines + _host_lines(cluster))


def _box(lines: list[str]) -> list[str]:
    inner = WIDTH - 4
    body = [f"│ {line[:inner]:<{inner}} │" for line in lines]
    return [f"┌{'─' * (WIDTH - 2)}┐", *body, f"└{'─' * (WIDTH - 2)}┘"]


def _wire(text: str) -> list[str]:
    return [f"     │ {text}"]


def _switch_lines(cluster: Cluster) -> list[str]:
    topology, host = cluster.topology, cluster.host
    layers: list[list[str]] = []
    rails = min(host.nics, host.devices) if topology.kind == "rail-optimised" else 1
    leaves, pods = cluster.leaves, math.ceil(cluster.leaves / topology.leaves_per_pod)
    ratio = f"{topology.oversubscription:g}:1"
    if pods > 1 and topology.kind != "fat-tree-2":
        layers += [_box([f"core switches, joining {pods} pods of {topology.leaves_per_pod * rails} leaves"])]
        layers += [_wire("uplinks of a pod, 1:1")]
    if leaves > 1:
        layers += [_box([f"spine switches, joining {leaves * rails} leaves"])]
        layers += [_wire(f"uplinks of a leaf, oversubscription {ratio}")]
    if topology.kind == "single-switch":
        layers += [_box([f"one switch for all {cluster.hosts} hosts"])]
    elif rails > 1:
        of = f"{leaves} x {rails} leaf switches" if leaves > 1 else f"{rails} leaf switches"
        layers += [_box([f"{of}, one a rail, of up to {topology.hosts_per_leaf} hosts each"])]
    else:
        name = "leaf switches" if leaves > 1 else "leaf switch"
        layers += [_box([f"{leaves} {name} of up to {topology.hosts_per_leaf} hosts each"])]
    if leaves == 1 and topology.oversubscription > 1:
        layers += [_wire(f"nothing leaves the leaf: oversubscription {ratio} has no effect")]
    nic = f"{host.nics} x {host.nic.name}, {si(host.nic_bandwidth, 'B/s')} each"
    return [line for layer in layers for line in layer] + _wire(nic)


def _torus_lines(cluster: Cluster) -> list[str]:
    dims = cluster.topology.dims
    rows, columns = (dims[-2], dims[-1]) if len(dims) > 1 else (1, dims[0])
    across = min(columns, 8)
    lines = [f"{'x'.join(map(str, dims))} torus of hosts, wrapped around in every dimension"]
    for row in range(min(rows, 4)):
        cells = "──".join(f"[{row * columns + column}]" for column in range(across))
        lines.append(f"──{cells}──" + ("" if across == columns else " …"))
    if rows > 4 or len(dims) > 2:
        lines.append("  … the further rows and planes likewise")
    ports = f"{cluster.host.nics} x {cluster.host.nic.name} shared by {2 * len(dims)} ports"
    return _box(lines) + _wire(f"{ports}, {si(cluster.host.nic_bandwidth, 'B/s')} a NIC")


def _host_lines(cluster: Cluster) -> list[str]:
    host = cluster.host
    labels = [f"[{local}]" for local in range(min(host.devices, 8))]
    if host.devices > 8:
        labels += ["…", f"[{host.devices - 1}]"]
    how = "switched" if host.intra_switched else "mesh"
    nic = f"{host.nics} x {host.nic.name} on {host.pcie.name}"
    lines = [
        f"host 0 of {cluster.hosts:,}: {host.cpu_cores} CPU cores, {nic}",
        "",
        " ".join(labels),
        f"{si(host.device.memory_bytes, 'B')} each at {si(host.device.memory_bandwidth, 'B/s')}",
    ]
    if host.devices > 1 or host.intra_hosts > 1:
        nvls = ", reduces in the switch (NVLS)" if host.nvls else ""
        inside = [f"{host.intra.name}, {how}, {si(host.intra.bandwidth, 'B/s')} a device{nvls}"]
        if host.intra_hosts > 1:
            inside.append(f"one {host.intra.name} switch joins {host.intra_hosts} hosts")
        lines[2:2] = [*inside, " " + "┴───" * (len(labels) - 1) + "┴"]
    return _box(lines)


def figures(cluster: Cluster) -> list[tuple[str, str, str]]:
    """Rows (figure, value, source) of everything that the cluster's times and memory depend on."""
    device, host, topology = cluster.host.device, cluster.host, cluster.topology
    source = device.sources.get
    rows = [
        ("device", device.torch_name, source("torch_name", "")),
        ("capability", ".".join(map(str, device.capability)), source("capability", "")),
        ("SMs", str(device.sm_count), source("sm_count", "")),
        ("memory", f"{device.memory_bytes / 2**30:.2f} GiB", source("memory_bytes", "")),
        ("memory bandwidth", si(device.memory_bandwidth, "B/s"), source("memory_bandwidth", "")),
        ("L2", f"{device.l2_bytes / 2**20:.4g} MiB", source("l2_bytes", "")),
        ("power limit", si(device.power_watts, "W"), source("power_watts", "")),
        ("sustained", f"{device.sustained:.2f} of the peak", source("sustained", "")),
    ]
    for dtype, rate in device.peak_flops.items():
        rows.append((f"peak {dtype}", si(rate, "FLOP/s"), source(f"peak_flops.{dtype}", "")))
    for place, link in (("intra", host.intra), ("NIC", host.nic), ("PCIe", host.pcie)):
        rows.append((f"{place} {link.name}", _link_text(link), link.source))
    rows.append(("host", f"{host.devices} devices, {host.nics} NICs, {host.cpu_cores} cores", host.source))
    rows.append(("topology", topology_text(cluster), topology.source))
    if cluster.price_per_device_hour is not None:
        rows.append(("price", f"{cluster.price_per_device_hour:g} a device-hour", "given by the user"))
    return rows


def _link_text(link: Link) -> str:
    return f"{si(link.bandwidth, 'B/s')}, {si(link.latency, 's')}, reaches {link.efficiency:.0%}"


def topology_text(cluster: Cluster) -> str:
    """The topology in a few words."""
    topology = cluster.topology
    parts: list[str] = [topology.kind]
    if topology.kind in TORI:
        parts.append("x".join(map(str, topology.dims)))
    elif topology.kind != "single-switch":
        parts.append(f"{topology.hosts_per_leaf} hosts a leaf")
        parts.append(f"oversubscription {topology.oversubscription:g}")
    parts.append(f"{si(topology.hop_latency, 's')} a hop")
    return ", ".join(parts)


def example_groups(cluster: Cluster) -> list[tuple[str, GroupPlacement]]:
    """A few groups that jobs commonly make, and what each of them crosses."""
    world, devices = cluster.world_size, cluster.devices_per_host
    groups: dict[str, range] = {}
    if devices > 1:
        groups["all devices of one host"] = range(devices)
    if cluster.hosts > 1:
        groups["two hosts next to each other"] = range(2 * devices)
        groups["the first device of every host"] = range(0, world, devices)
        groups["all ranks"] = range(world)
    return [(name, cluster.placement(ranks)) for name, ranks in groups.items()]


def plain(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain data for JSON, with what follows from it."""
    derived = {
        "world_size": cluster.world_size,
        "devices_per_host": cluster.devices_per_host,
        "leaves": cluster.leaves,
        "groups": {name: asdict(placement) for name, placement in example_groups(cluster)},
    }
    return asdict(cluster) | derived
