"""What `--confidential` adds: by the formula, to what leaves a GPU, and nothing where it is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from support import quick
from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.emulation import EmulationResult, capture, simulate
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import Function
from windtunnel.training.emulate.summarise import summarise
from windtunnel.training.emulate.summary import Summary
from windtunnel.trust.gpu import SCHEMES
from windtunnel.trust.gpu.schemes import messages, scheme_of

CLUSTER = load_cluster("h100-sxm:1x2")
NUMBERS = 1 << 22


def summing() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mine = torch.ones(NUMBERS, device="cuda")
    for _ in range(3):
        batch = torch.ones(1 << 20).to("cuda")
        dist.all_reduce(mine)
        (batch.sum() + mine.sum()).item()


@pytest.fixture(scope="module")
def by_scheme(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[EmulationResult, Summary]]:
    """One capture, emulated by each scheme, and without."""
    with quick.captures():
        classes = capture(Function(summing, ()), CLUSTER, Options())
    emulations = {}
    for name in ("none", *SCHEMES):
        result = simulate(Function(summing, ()), CLUSTER, Options(confidential=name), take=lambda *_: classes)
        emulations[name] = result, summarise(result, "run", tmp_path_factory.mktemp("run"))
    return emulations


pytestmark = pytest.mark.xdist_group("parity")  # which has a capture's worker already


def changed(summary: Summary) -> dict[str, Any]:
    """All but what differs between any two runs."""
    content = summary.to_json()
    for name in ("created_at", "wall_time_s", "capture_time_s", "peak_rss_bytes", "directory"):
        del content[name]
    return content


def test_where_it_is_off_not_a_byte_of_the_summary_is_other(by_scheme: Any, tmp_path: Path) -> None:
    result, summary = by_scheme["none"]
    plain = simulate(Function(summing, ()), CLUSTER, Options(), take=lambda *_: result.classes)
    assert changed(summarise(plain, "run", tmp_path)) == changed(summary)
    assert "confidential" not in str(summary.to_json())
    assert Summary.from_json(summary.to_json()) == summary


@pytest.mark.parametrize("name", SCHEMES)
def test_a_collective_is_longer_by_the_formula_and_the_summary_says_by_what(
    by_scheme: Any, name: str
) -> None:
    (_, plain), (_, guarded) = by_scheme["none"], by_scheme[name]
    scheme, nbytes = SCHEMES[name], NUMBERS * 4
    added = 2 * (2 - 1) * 2 * (scheme.call + nbytes / 2 / scheme.rate)
    (before,), (after,) = plain.collectives, guarded.collectives
    assert after.algorithm == "ring"  # a switch cannot add up ciphertexts
    assert after.seconds_each == pytest.approx(nbytes / after.bus_bandwidth, rel=0.02)
    assert after.seconds_each > added and after.bus_bandwidth < before.bus_bandwidth
    assert guarded.iteration_time_s > plain.iteration_time_s
    facts = guarded.to_json()["confidential"]
    assert (facts["scheme"], facts["messages"], facts["copies"]) == (name, 3 * 2, 3 * 2)  # rounds of one step
    assert facts["collective_seconds"] == pytest.approx(3 * added)
    assert facts["copy_seconds"] == pytest.approx(3 * (scheme.copy(4 << 20) + scheme.copy(0)))
    assert guarded.provenance["confidential"] == "emulated" and facts["source"]
    assert Summary.from_json(guarded.to_json()) == guarded


def test_messages_of_collectives() -> None:
    assert messages("all_reduce", 400.0, 4) == (6, 100.0)
    assert messages("barrier", 400.0, 4) == (6, 0.0)
    assert messages("all_gather", 400.0, 4) == messages("all_to_all", 400.0, 4) == (3, 100.0)
    assert messages("send", 400.0, 2) == (1, 400.0)
    count, each = messages("broadcast", 300.0, 4)
    assert count * each == 300.0
    assert messages("all_reduce", 400.0, 1) == (0, 0.0)


def test_more_buckets_cost_more_calls() -> None:
    scheme = SCHEMES["h100-cc"]
    parts = sum(scheme.collective("all_reduce", 1e8, 4) for _ in range(10))
    assert parts - scheme.collective("all_reduce", 1e9, 4) == pytest.approx(9 * 6 * 2 * scheme.call)


def test_bad_values_are_refused() -> None:
    assert scheme_of("none", "cpu", True) is None
    with pytest.raises(UserError, match="'sgx' is unknown; accepted are none, hix, graviton, h100-cc"):
        wt.emulate(summing, cluster=CLUSTER, confidential="sgx")
    with pytest.raises(UserError, match="'hix' with no GPUs is not priced"):
        scheme_of("hix", "cpu", False)
    with pytest.raises(UserError, match="with switches or fabrics that read what they carry"):
        scheme_of("hix", "gpu", True)
