"""The hardware catalogue: devices, links and hosts as YAML data, each figure with its source beside it.

``devices.yaml``, ``links.yaml`` and ``hosts.yaml`` hold the figures; this module turns them into the types of
`windtunnel.cluster.model`. A pair ``[value, source]`` names a source that is spelled out at the end of its
file; a source that begins with "inference" is our estimate and not a published figure.

The device ``cpu`` is one core of this host with one thread, measured and not looked up: a short NumPy
benchmark (about a second, in a process of its own so that the BLAS library can be held to one thread) gives
the matrix product rate in float32 and float64 and the rate of a large copy, bytes read plus bytes written.
The result is kept in the user's cache directory until the host changes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import yaml

from windtunnel.base import atomic, paths
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
        return measured_cpu()
    document = _read("devices.yaml")
    entry = dict(document["devices"][name])
    cited = document["sources"]
    peaks = {dtype: float(value) for dtype, (value, _) in entry.pop("peak_flops").items()}
    sources = {
        f"peak_flops.{dtype}": cited[source]
        for dtype, (_, source) in document["devices"][name]["peak_flops"].items()
    }
    fields = {"name": name, "vendor": entry.pop("vendor"), "kind": entry.pop("kind"), "peak_flops": peaks}
    sources = {key: cited[source] for key, (_, source) in entry.items()} | sources
    values = {key: value for key, (value, _) in entry.items()}
    for key in ("memory_bytes", "memory_bandwidth", "power_watts", "sustained"):
        values[key] = float(values[key])  # YAML takes 0.9e12 for text
    values["capability"] = tuple(values["capability"])
    return Device(**fields, **values, sources=sources)


@cache
def link(name: str) -> Link:
    """The link called ``name``. Raises KeyError for an unknown name."""
    document = _read("links.yaml")
    entry = document["links"][name]
    cited = document["sources"]
    figures = ("bandwidth", "latency", "efficiency")
    bandwidth, latency, efficiency = (float(entry[figure][0]) for figure in figures)
    source = "; ".join(f"{figure}: {cited[entry[figure][1]]}" for figure in figures)
    return Link(name, bandwidth, latency, efficiency, source)


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
        device=device(name), devices=entry["devices"], intra=link(entry["intra"]),
        intra_switched=entry["intra_switched"], nvls=entry["nvls"], nic=link(entry["nic"]),
        nics=entry["nics"], pcie=link(entry["pcie"]), cpu_cores=entry["cpu_cores"], source=source,
    )  # fmt: skip
    topology = Topology(
        kind=kind, hosts_per_leaf=entry["hosts_per_leaf"], leaves_per_pod=entry["leaves_per_pod"],
        hop_latency=hop_latency(entry["nic"]) or 0.0, source=source,
    )  # fmt: skip
    return HostKind(host, topology, entry.get("tray_devices", 0), entry.get("trays", 0))


def max_devices(name: str) -> int:
    """How many devices the usual host of ``name`` has at most, without measuring anything."""
    return int(_read("hosts.yaml")["hosts"][name]["devices"])


BENCHMARK = """
import json, time
import numpy as np

def best(work, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)

def matmul(dtype, n=1024):
    a = np.random.default_rng(0).standard_normal((n, n)).astype(dtype)
    out = np.empty_like(a)
    np.matmul(a, a, out=out)
    return 2 * n**3 / best(lambda: np.matmul(a, a, out=out), 5)

source = np.ones(1 << 24)
target = np.empty_like(source)
np.copyto(target, source)
copy = 2 * source.nbytes / best(lambda: np.copyto(target, source), 5)
print(json.dumps({"float32": matmul("float32"), "float64": matmul("float64"), "copy": copy}))
"""
FIGURES = ("float32", "float64", "copy")
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def measured_cpu() -> Device:
    """One core of this machine, from the cache or measured now. Memory is all that the machine has."""
    figures = _cached() or _measure()
    measured = f"measured on this machine ({processor_name()}), one thread, NumPy"
    lacking = "inference, the measured float32 rate"
    return Device(
        name="cpu", vendor=platform.machine(), kind="cpu", torch_name=processor_name(), capability=(0, 0),
        sm_count=1, memory_bytes=float(psutil.virtual_memory().total), memory_bandwidth=figures["copy"],
        l2_bytes=_last_level_cache(), power_watts=0.0, sustained=1.0,
        peak_flops={
            "float64": figures["float64"],
            "float32": figures["float32"],
            "bfloat16": figures["float32"],
            "float16": figures["float32"],
        },
        sources={
            "torch_name": "told by this machine",
            "capability": "a CPU has none",
            "sm_count": "a rank runs on one core",
            "memory_bytes": "told by this machine",
            "memory_bandwidth": f"{measured} copy of 128 MiB, bytes read and written",
            "l2_bytes": "told by this machine, last level of cache",
            "power_watts": "unknown",
            "sustained": "the peaks are what was reached",
            "peak_flops.float64": f"{measured} product of 1024 x 1024 matrices",
            "peak_flops.float32": f"{measured} product of 1024 x 1024 matrices",
            "peak_flops.bfloat16": lacking,
            "peak_flops.float16": lacking,
        },
    )  # fmt: skip


def cache_file() -> Path:
    """Where the measurement is kept."""
    return paths.cache() / "cpu.json"


def _cached() -> dict[str, float] | None:
    try:
        saved = json.loads(cache_file().read_text())
        if saved["machine"] == _machine() and all(saved[figure] > 0 for figure in FIGURES):
            return {figure: float(saved[figure]) for figure in FIGURES}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or a damaged one: measuring again costs a second
    return None


def _measure() -> dict[str, float]:
    environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
    output = subprocess.run(
        [sys.executable, "-c", BENCHMARK], env=environment, check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(output.stdout)
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        atomic.replace(cache_file(), json.dumps(figures | {"machine": _machine()}))
    except OSError:
        pass  # a read-only home only costs the next run its second
    return figures


def _machine() -> str:
    return f"{processor_name()} x {os.cpu_count()}"


def processor_name() -> str:
    """The name of the processor, as the kernel tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    """Bytes of the largest cache that core 0 sees; 1 MiB where the kernel does not tell."""
    sizes = [1 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
        if factor and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * factor)
    return max(sizes)
