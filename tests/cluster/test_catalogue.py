"""The catalogue against published figures, and the rules that every entry keeps."""

import json
from pathlib import Path

import pytest

from windtunnel.cluster import catalogue

GPUS = [name for name in catalogue.device_names() if name != "cpu"]


# Read off the vendors' datasheets: dense bf16 or fp16 peak in TFLOP/s, memory in GB on the box, TB/s, watts.
@pytest.mark.parametrize(
    ("name", "dtype", "peak", "memory", "bandwidth", "watts"),
    [
        ("v100", "float16", 125, 32 * 1.0737, 0.9, 300),
        ("t4", "float16", 65, 16, 0.32, 70),
        ("l4", "bfloat16", 121, 24, 0.3, 72),
        ("a100-40", "bfloat16", 312, 40 * 1.0737, 1.555, 400),
        ("a100-80", "bfloat16", 312, 80 * 1.0737, 2.039, 400),
        ("h100-sxm", "bfloat16", 989.4, 80 * 1.0737, 3.35, 700),
        ("h100-96", "bfloat16", 989.4, 96 * 1.0737, 2.4, 500),
        ("h200", "bfloat16", 989.4, 141 * 1.0737, 4.8, 700),
        ("b200", "bfloat16", 2250, 180 * 1.0737, 8, 1000),
        ("gb200", "bfloat16", 2500, 186 * 1.0737, 8, 1200),
        ("mi300x", "bfloat16", 1307.4, 192 * 1.0737, 5.3, 750),
    ],
)
def test_datasheets(
    name: str, dtype: str, peak: float, memory: float, bandwidth: float, watts: float
) -> None:
    device = catalogue.device(name)
    assert device.peak_flops[dtype] == pytest.approx(peak * 1e12)
    assert device.memory_bandwidth == pytest.approx(bandwidth * 1e12)
    assert device.power_watts == watts
    # The driver keeps a little back, never more than a twelfth.
    assert memory * 11 / 12 <= device.memory_bytes / 1e9 <= memory


def test_hopper_peak_follows_from_its_clock() -> None:
    # 132 SMs x 4 tensor cores x 512 dense bf16 FMA a clock x 2 x 1.83 GHz (H100 whitepaper).
    device = catalogue.device("h100-sxm")
    assert device.peak("bfloat16") == pytest.approx(device.sm_count * 4 * 512 * 2 * 1.83e9, rel=1e-3)


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_has_a_source(name: str) -> None:
    device = catalogue.device(name)
    plain = {
        "torch_name",
        "capability",
        "sm_count",
        "memory_bytes",
        "memory_bandwidth",
        "l2_bytes",
        "sustained",
    }
    figures = plain | {"power_watts"} | {f"peak_flops.{dtype}" for dtype in device.peak_flops}
    assert device.sources.keys() == figures
    assert all(device.sources.values())
    assert 0 < device.sustained <= 1
    assert catalogue.host_kind(name).host.source and catalogue.host_kind(name).topology.source
    hash(device)


def test_a_power_limit_costs_throughput() -> None:
    assert catalogue.device("h100-96").sustained < catalogue.device("h100-sxm").sustained


def test_narrower_types_are_never_slower() -> None:
    for name in GPUS:
        peaks = catalogue.device(name).peak_flops
        for wide, narrow in (("float64", "float32"), ("float32", "float16"), ("float16", "int8")):
            if name != "v100" or narrow != "int8":  # the V100's tensor cores know float16 only
                assert peaks[wide] <= peaks[narrow], (name, wide, narrow)


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [
        ("nvlink-4", 3600),
        ("pcie-5", 504),
        ("ib-400", 400),
        ("roce-800", 800),
        ("ethernet-1", 1),
        ("xgmi-3", 3584),
    ],
)
def test_link_rates(name: str, gigabits: float) -> None:
    assert catalogue.link(name).bandwidth * 8 == pytest.approx(gigabits * 1e9)


def test_every_link_has_figures_and_sources() -> None:
    for name in catalogue.link_names():
        link = catalogue.link(name)
        assert link.bandwidth > 0 and link.latency > 0 and 0 < link.efficiency <= 1
        assert link.source.count(": ") >= 3
    assert set(catalogue.link_names(network=True)) | set(catalogue.link_names(network=False)) == set(
        catalogue.link_names()
    )


def test_the_cpu_measurement_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = catalogue.measured_cpu()
    assert catalogue.cache_file().is_relative_to(tmp_path)
    monkeypatch.setattr(catalogue, "_measure", lambda: pytest.fail("measured again"))
    assert catalogue.measured_cpu() == first


@pytest.mark.parametrize(
    "damage", ["", "{}", "[1]", '{"machine": "another", "float32": 1, "float64": 1, "copy": 1}']
)
def test_a_damaged_or_foreign_measurement_is_made_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(catalogue, "_measure", lambda: {"float32": 2.0, "float64": 1.0, "copy": 3.0})
    catalogue.cache_file().parent.mkdir(parents=True)
    catalogue.cache_file().write_text(damage)
    assert catalogue.measured_cpu().memory_bandwidth == 3.0
    good = {"machine": catalogue._machine(), "float32": 5, "float64": 4, "copy": 6}
    catalogue.cache_file().write_text(json.dumps(good))
    assert catalogue.measured_cpu().memory_bandwidth == 6.0
