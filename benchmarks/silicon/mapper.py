"""Energy that sizing memories saves, and how long a decision takes."""

import copy
import time
from collections.abc import Iterator

from benchmarks.harness.measure import seconds_of
from benchmarks.harness.rows import Row, figure
from windtunnel.silicon.mapper import Accelerator, Layer, Observation, decide, read_accelerator, read_layers
from windtunnel.silicon.mapper.policy.allocation import allocate
from windtunnel.silicon.mapper.spec import accelerator, shipped

PAPER = "Yang et al., Interstellar, ASPLOS 2020, abstract: up to"
PUBLISHED = {"CNN": 4.2, "LSTM": 1.6, "MLP": 1.8}


def allocation_rows(quick: bool) -> Iterator[Row]:
    """The Eyeriss-like base, its energies by either table; the best layer of CNNs, other networks whole. In
    Interstellar's artefact tiles may fill a memory (`fit_in_level`), and throughput is the PEs in use,
    as it has no bandwidths. So here, and then with tiles in halves, which hides moving behind computing."""
    convs = [layer for layer in read_layers("alexnet") if layer.name.startswith("conv")]
    networks = {
        "CNN": [[layer] for layer in convs],
        "LSTM": [read_layers("lstm")],
        "MLP": [read_layers("mlp")],
    }
    for table, halves in (("sram", False), ("sram-artefact", False), ("sram", True)):
        base = _base(table, halves)
        for name, parts in networks.items():
            sized = [allocate(layers, base, "C|K", decide) for layers in parts]
            best = max(sized, key=lambda choice: choice.gain)
            sizes = " + ".join(f"{level.capacity:,.0f} B" for level in best.best.accelerator.levels[:2])
            each = ", ".join(f"{choice.gain:.2f}" for choice in sized)
            published = PUBLISHED[name] if (table, halves) == ("sram", False) else None
            yield figure(
                f"{name}, C|K, {table}{', halves' * halves}", "times less energy", emulated=best.gain,
                goal=f">= {published}" if published else "", published=published, source=PAPER,
                note=f"{sizes} instead of 512 B + 131,072 B, same throughput; by part {each}",
            )  # fmt: skip


def _base(table: str, halves: bool) -> Accelerator:
    document = copy.deepcopy(shipped("eyeriss")) | {"double_buffered": halves}
    for level in document["levels"].values() if not halves else ():
        level.pop("bandwidth", None)
    document["levels"]["buffer"]["energy"] = table
    return accelerator(document, "eyeriss")


def search_rows(quick: bool) -> Iterator[Row]:
    """CPU seconds of one layer and dataflow, for layers of all kinds."""
    chip = read_accelerator("eyeriss")
    layers = [*read_layers("alexnet"), *read_layers("vgg16"), *read_layers("lstm")]
    for layer in layers:
        decide(Observation(layer, chip, "C|K"))  # what Numba compiles is not what is measured
    seconds = [_seconds(layer, chip) for layer in layers]
    yield figure("a layer and dataflow", "CPU s", seconds, "<= 0.1", note="layers on eyeriss, C|K")


def _seconds(layer: Layer, chip: Accelerator) -> float:
    return seconds_of(lambda: decide(Observation(layer, chip, "C|K")), time.process_time)
