"""The device ``cpu``: one core of this machine with one thread, measured and not looked up.

A short NumPy benchmark (about a second, one thread, in a process of its own so that the BLAS library can be
held to one thread) gives the matrix product rate in float32 and float64 and the rate of a large copy, bytes
read plus bytes written. The result is kept in the user's cache directory until the machine changes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil

from windtunnel.base import atomic, paths
from windtunnel.cluster.model import Device

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
        name="cpu",
        vendor=platform.machine(),
        kind="cpu",
        torch_name=processor_name(),
        capability=(0, 0),
        sm_count=1,
        memory_bytes=float(psutil.virtual_memory().total),
        memory_bandwidth=figures["copy"],
        l2_bytes=_last_level_cache(),
        power_watts=0.0,
        sustained=1.0,
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
    )


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
