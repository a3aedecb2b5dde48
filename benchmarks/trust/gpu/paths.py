"""Data go in, a program runs, results come out: real processes, and each path in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measure import conditions, in_turn, scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.trust.gpu import Gpu, GpuHost

HIX = "Jang et al., HIX, ASPLOS 2019, abstract: the mean of Rodinia, on a GPU, with AES-NI at the host"
PATHS = ("plain", "pipelined", "single", "double")
Arrays = list[NDArray[np.generic]]


def jobs() -> dict[str, tuple[Arrays, Arrays]]:
    """Of each program what it reads, and what it writes (with what lies there before)."""
    rng, size = np.random.default_rng(0), 1024

    def draw(shape: tuple[int, ...]) -> NDArray[np.float32]:
        return rng.random(shape, np.float32)

    points, nodes = draw((size * 128, 32)), size * 256
    graph = rng.integers(0, nodes, (nodes, 8), dtype=np.int32)
    return {
        "matmul": ([draw((size, size)), draw((size, size))], [np.zeros((size, size), np.float32)]),
        "stencil": ([draw((size * 2, size * 2))], [np.zeros((size * 2, size * 2), np.float32)]),
        "kmeans": ([points], [np.zeros((16, 32), np.float32)]),
        "bfs": ([graph], [np.zeros(nodes, np.int64)]),
        "backprop": ([draw((size * 16, 128)), draw((size * 16, 8))], [draw((128, 64)), draw((64, 8))]),
    }  # fmt: skip


def once(gpu: Gpu, program: str, reads: Arrays, writes: Arrays) -> tuple[float, float]:
    """Seconds of copies, from the arrays of the user and back, and of the program between them."""
    inside, outside = ([gpu.empty(one.shape, one.dtype) for one in each] for each in (reads, writes))
    began = time.perf_counter()
    for buffer, content in zip(inside + outside, reads + writes, strict=True):
        gpu.write(buffer, content)
    before = time.perf_counter()
    gpu.run(program, inside, outside)
    after = time.perf_counter()
    results = [gpu.read(one) for one in outside]
    took = time.perf_counter() - began, after - before
    if not all(np.any(one) for one in results):
        raise ValueError(f"{program}: a result is all zeros")
    return took[0] - took[1], took[1]


def paths_rows(quick: bool) -> Iterator[Row]:
    """Slowdown by path against plain copies by the same processes. Of copies, and of the program, which is
    the same by each path, the best of rounds counts: other work on the host only adds."""
    ratios: dict[str, list[float]] = {path: [] for path in PATHS}
    with scratch(Path("/dev/shm")) as folder:
        programs = Path(__file__).with_name("programs.py")
        with GpuHost(folder, programs, pages=8192, shared=folder) as host:

            def arm(path: str, name: str, reads: Arrays, writes: Arrays) -> tuple[float, float]:
                with host.claim(path) as gpu:
                    return once(gpu, name, reads, writes)

            for name, (reads, writes) in jobs().items():
                load, nbytes = conditions(), sum(one.nbytes for one in reads + writes)
                arms = {path: partial(arm, path, name, reads, writes) for path in PATHS}
                rounds = in_turn(arms, 3 if quick else 9)
                program = min(ran for took in rounds.values() for _, ran in took)
                found = {path: program + min(copies for copies, _ in took) for path, took in rounds.items()}
                for path in PATHS[1:]:
                    ratios[path].append(found[path] / found["plain"])
                    yield figure(
                        f"{name}: {path} / plain", "x", ratios[path][-1],
                        note=f"{nbytes >> 20} MiB, program {program * 1e3:.0f} ms; {load}",
                    )  # fmt: skip
    means = {path: float(np.mean(ratios[path])) for path in PATHS[1:]}
    order = means["pipelined"] <= means["single"] <= means["double"]
    for path, mean in means.items():
        ours = path == "pipelined"
        yield figure(
            f"mean of {len(ratios[path])}: {path} / plain", "x", mean,
            "pipelined <= single <= double" if ours else "", met=order,
            published=1.26 if ours else None, source=HIX,
        )  # fmt: skip
