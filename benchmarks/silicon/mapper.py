"""Counts and optima against brute force, energy that sizing saves, and time beside ZigZag's."""

import contextlib
import copy
import importlib
import io
import itertools
import logging
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness.measure import scratch, seconds_of
from benchmarks.harness.rows import Row, figure, left_out
from tests.silicon.mapper.brute import exhaustive, random_case, random_tiny, simulate
from windtunnel.silicon.mapper import Accelerator, Layer, Observation, decide, read_accelerator, read_layers
from windtunnel.silicon.mapper.model import LETTERS, OPERANDS, Mapping
from windtunnel.silicon.mapper.policy.allocation import allocate
from windtunnel.silicon.mapper.policy.counts import count, joules, traffic_of
from windtunnel.silicon.mapper.policy.search import least_energy
from windtunnel.silicon.mapper.spec import accelerator, shipped

WIDE = 512  # words of a port of ZigZag's memories
PAPER = "Yang et al., Interstellar, ASPLOS 2020, abstract: up to"
PUBLISHED = {"CNN": 4.2, "LSTM": 1.6, "MLP": 1.8}


def counts_rows(quick: bool) -> Iterator[Row]:
    """Random nests: strides, loops of bound 1, any order and unrolling, levels that operands pass by."""
    rng, nests = np.random.default_rng(0), 200 if quick else 1000
    counts, wrong = 0, 0
    for _ in range(nests):
        case = random_case(rng)
        pairs = [*zip(count(*case), simulate(*case), strict=True)]
        counts, wrong = counts + len(pairs), wrong + sum(one != other for one, other in pairs)
    note = f"of {counts:,} counts of an operand at a level"
    yield figure(f"{nests:,} random nests", "counts that differ", float(wrong), "0", note=note)


def optimum_rows(quick: bool) -> Iterator[Row]:
    """Tiny layers, of which all tilings and all orders can be tried."""
    rng, layers = np.random.default_rng(1), 30 if quick else 200
    wrong = none = 0
    for _ in range(layers):
        layer, chip, unroll = random_tiny(rng)
        found = least_energy(layer, chip, "", unroll)[1]
        truth = exhaustive(layer, chip, unroll)
        none += math.isinf(truth)
        wrong += not (found == truth or math.isclose(found, truth, rel_tol=1e-9))
    note = f"{none} of them fit in no way, which is told"
    yield figure(f"{layers} tiny layers", "optima that differ", float(wrong), "0", note=note)


def allocation_rows(quick: bool) -> Iterator[Row]:
    """The Eyeriss-like base, its energies by either table; the best layer of CNNs, other networks whole. In
    Interstellar's artefact tiles may fill a memory (`fit_in_level`), and throughput is the PEs in use,
    as it has no bandwidths. So here, and then with tiles in halves, which hides moving behind computing."""
    convs = [one for one in read_layers("alexnet") if one.name.startswith("conv")]
    networks = {"CNN": [[one] for one in convs], "LSTM": [read_layers("lstm")], "MLP": [read_layers("mlp")]}
    for table, halves in (("sram", False), ("sram-artefact", False), ("sram", True)):
        base = _base(table, halves)
        for name, parts in networks.items():
            made = [allocate(layers, base, "C|K", decide) for layers in parts]
            best = max(made, key=lambda one: one.gain)
            sizes = " + ".join(f"{one.capacity:,.0f} B" for one in best.best.accelerator.levels[:2])
            each = ", ".join(f"{one.gain:.2f}" for one in made)
            known = PUBLISHED[name] if (table, halves) == ("sram", False) else None
            yield figure(
                f"{name}, C|K, {table}{', halves' * halves}", "times less energy", emulated=best.gain,
                goal=f">= {known}" if known else "", published=known, source=PAPER,
                note=f"{sizes} instead of 512 B + 131,072 B, same throughput; by part {each}",
            )  # fmt: skip
    base, gains = _base("sram", False), dict[str, float]()
    for layer in convs[1:3]:
        least = min(decide(Observation(layer, chip, "C|K")).energy for chip in _two_register_levels(base))
        gains[layer.name] = decide(Observation(layer, base, "C|K")).energy / least
    each = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    yield figure(
        "CNN, C|K, sram, two levels of registers", "times less energy", emulated=max(gains.values()),
        note=f"8 to 32 B before 64 to 256 B in each PE, by beam; {each}",
    )  # fmt: skip


def _base(table: str, halves: bool) -> Accelerator:
    document = copy.deepcopy(shipped("eyeriss")) | {"double_buffered": halves}
    for level in document["levels"].values() if not halves else ():
        level.pop("bandwidth", None)
    document["levels"]["buffer"]["energy"] = table
    return accelerator(document, "eyeriss")


def _two_register_levels(base: Accelerator) -> Iterator[Accelerator]:
    registers, buffer, dram = base.levels
    for inner, outer, shared in itertools.product((8, 16, 32), (64, 128, 256), (1 << 17, 1 << 18)):
        first, second = replace(registers, name="inner").sized(inner), registers.sized(outer)
        yield replace(base, levels=(first, second, buffer.sized(shared), dram))


def search_rows(quick: bool) -> Iterator[Row]:
    """CPU seconds of one layer and dataflow: layers of all kinds, then one that ZigZag maps as well."""
    chip = read_accelerator("eyeriss")
    layers = [*read_layers("alexnet"), *read_layers("vgg16"), *read_layers("lstm")]
    for layer in layers:
        decide(Observation(layer, chip, "C|K"))  # what Numba compiles is not what is measured
    taken = [_seconds(layer, chip) for layer in layers]
    yield figure("a layer and dataflow", "CPU s", taken, "<= 0.1", note="layers on eyeriss, C|K")
    layer = Layer("3x3 of 128", (3, 3, 28, 28, 128, 128, 1))
    plain = accelerator(shipped("eyeriss") | {"double_buffered": False}, "eyeriss")
    try:
        zigzag = importlib.import_module("zigzag.api").get_hardware_performance_zigzag
    except ModuleNotFoundError as error:
        yield left_out("ZigZag", f"{error}: pip install zigzag-dse six")
        return
    begun = time.process_time()
    energy, mapping = _mapped(zigzag, layer, plain)
    other, own = time.process_time() - begun, statistics.median(_seconds(layer, plain) for _ in range(5))
    made = decide(Observation(layer, plain, "C|K"))
    yield figure("ZigZag 3.9.1 (LOMA, 6 factors)", "CPU s", other)
    note = f"the mapper: {own:.4f} s"
    yield figure("ZigZag over the mapper", "times", other / own, ">= 100", note=note)
    moved = [traffic for one in OPERANDS for traffic in traffic_of(layer, plain, mapping[one], one)]
    counted = joules(layer, plain, mapping["O"], moved)
    yield figure(
        "energy of ZigZag's mapping over the mapper's, by the counts here", "times",
        emulated=counted / made.energy, note=f"ZigZag itself says {energy / counted:.2f} times these counts",
    )  # fmt: skip


def _seconds(layer: Layer, chip: Accelerator) -> float:
    return seconds_of(lambda: decide(Observation(layer, chip, "C|K")), time.process_time)


def _mapped(zigzag: Any, layer: Layer, chip: Accelerator) -> tuple[float, dict[str, Mapping]]:
    """ZigZag's least energy (joules) with C|K on the same chip, and its mapping: it splits the loops over the
    levels for each operand in another way. Ports are so wide that none binds; a cost is of a whole port."""
    logging.disable(logging.WARNING)
    bits, axes = 8 * chip.word, ["D1", "D2"]

    def port(kind: str, first: str, second: str) -> dict[str, Any]:
        lines = [f"I1, {first}", f"I2, {first}", f"O, {first}", f"O, {second}"]
        widths = {"bandwidth_min": bits, "bandwidth_max": WIDE * bits}
        return {"name": f"{kind[0]}_port_1", "type": kind, "allocation": lines, **widths}

    memories = {
        level.name: {
            "size": int(8 * (level.capacity or 0)), "area": 0, "latency": 1, "operands": ["I1", "I2", "O"],
            **dict.fromkeys(("r_cost", "w_cost"), level.energy * 1e12 * WIDE),
            "ports": [port("read", "tl", "th"), port("write", "fh", "fl")],
            "served_dimensions": [] if level.per_pe else axes,
        }
        for level in chip.levels
    }  # fmt: skip
    workload = {
        "id": 0, "name": "layer", "operator_type": "Conv", "operand_source": {"I": 0, "W": 0},
        "equation": "O[b][k][oy][ox]+=W[k][c][fy][fx]*I[b][c][iy][ix]", "loop_dims": [*LETTERS],
        "dimension_relations": ["ix=1*ox+1*fx", "iy=1*oy+1*fy"], "loop_sizes": [*layer.bounds],
        "operand_precision": dict.fromkeys(("O", "O_final", "W", "I"), bits),
    }  # fmt: skip
    array = {"unit_energy": chip.mac * 1e12, "unit_area": 1, "dimensions": axes, "sizes": [*chip.array]}
    spatial = {axis: [f"{loop}, {pes}"] for axis, loop, pes in zip(axes, "KC", chip.array, strict=True)}
    links = {"O": "O", "W": "I2", "I": "I1"}
    files = {
        "workload": [workload],
        "hardware": {"name": chip.name, "memories": memories, "operational_array": array},
        "mapping": [{"name": "default", "spatial_mapping": spatial, "memory_operand_links": links}],
    }
    quiet = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with scratch() as folder, quiet[0], quiet[1]:
        places = [Path(folder, f"{name}.yaml") for name in files]
        for place, content in zip(places, files.values(), strict=True):
            place.write_text(yaml.safe_dump(content, sort_keys=False))
        energy, _, found = zigzag(
            *map(str, places), opt="energy", dump_folder=str(folder / "out"), loma_show_progress_bar=False
        )
    unroll = tuple({"K": chip.array[0], "C": chip.array[1]}.get(name, 1) for name in LETTERS)
    mapping = {}
    for operand, levels in found[0][1][0][0].temporal_mapping.mapping_dic_origin.items():
        loops = (tuple((LETTERS.index(str(dim)), int(bound)) for dim, bound in level) for level in levels)
        mapping[str(operand)] = Mapping("C|K", unroll, tuple(loops))
    return energy * 1e-12, mapping
