"""Calls take the cheaper of NCCL's best and of what a fabric has for them; without one all is as before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support import quick
from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.fabrics import alternatives
from windtunnel.training.emulate.emulation import capture, simulate
from windtunnel.training.emulate.graph import Alternative, Collective, Group
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import Function
from windtunnel.training.emulate.run import Fabrics, emulate
from windtunnel.training.emulate.summary import Summary
from windtunnel.training.emulate.twin.costs.collectives import (
    CollectiveCost,
    collective_cost,
    or_alternative,
    sharing_of,
)

TORUS = load_cluster("v100:9x1,topology=optical-torus,dims=3x3")
ALL = Group("", tuple(range(9)))
CALL = Collective("all_to_all", 0, 9 << 20, 9 << 20)


def exchanging() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mine = torch.ones(9 << 18, device="cuda")
    for _ in range(3):
        dist.all_to_all_single(torch.empty_like(mine), mine)
        dist.all_reduce(mine)


def by_nccl(call: Collective, group: Group) -> CollectiveCost:
    placement = TORUS.placement(group.ranks)
    return collective_cost(call.kind, call.in_bytes, placement, TORUS, sharing=sharing_of(TORUS, placement))


def constant(seconds: float | None) -> Alternative:
    return Alternative("wire", "all", lambda call, group: seconds)


@pytest.mark.xdist_group("parity")  # which has a capture's worker already
def test_the_report_names_who_carries_a_call_and_without_fabrics_nothing_changes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    with quick.captures():
        classes = capture(Function(exchanging, ()), TORUS, Options())

    def summary(fabrics: Fabrics, cluster: Cluster = TORUS, options: Options | None = None) -> Summary:
        done = emulate(
            exchanging, (), cluster, options, pictures=False, take=lambda *_: classes, fabrics=fabrics
        )  # fmt: skip
        return done.summary

    def plain(report: Summary) -> dict[str, Any]:
        ours = {
            "run_id",
            "created_at",
            "directory",
            "wall_time_s",
            "peak_rss_bytes",
            "cluster",
            "capture_time_s",
        }
        return {name: value for name, value in report.to_json().items() if name not in ours}

    lit, electrical = (
        summary(alternatives),
        summary(lambda *_: (), load_cluster(TORUS.name.replace("optical-", ""))),
    )
    assert {collective.kind: collective.algorithm for collective in lit.collectives} == {
        "all_to_all": "optical-torus", "all_reduce": "ring",
    }  # fmt: skip
    assert lit.iteration_time_s < electrical.iteration_time_s
    assert "optical-torus is for all_to_all over world, where it is the cheapest" in lit.approximations[-1]
    none = summary(lambda *_: (replace(alternatives(TORUS)[0], seconds=lambda *_: None),))
    assert "optical-torus is of no use: it takes all_to_all between hosts" in none.approximations
    figures = plain(none) | {"approximations": list(none.approximations[:-1])}
    assert figures == plain(electrical)

    tree = load_cluster("v100:9x1")
    before, same = summary(lambda *_: (), tree), summary(alternatives, tree)
    assert plain(same) == plain(before)
    adding = summary(alternatives, tree, Options(aggregation="switchml", neighbours=1))
    assert {collective.kind: collective.algorithm for collective in adding.collectives} == {
        "all_to_all": "direct", "all_reduce": "switchml",
    }  # fmt: skip
    assert adding.iteration_time_s < before.iteration_time_s
    assert (
        "switchml is for all_reduce over world, where it is the cheapest (3 of 3)"
        in (adding.approximations[-1])
    )


def test_the_cheapest_is_taken_and_ncclls_own_time_is_on_top() -> None:
    cost = by_nccl(CALL, ALL)
    assert or_alternative(cost, CALL, ALL, [constant(None), constant(1.0)]) is cost
    fast = or_alternative(cost, CALL, ALL, [constant(2e-6), constant(1e-6), constant(3e-6)])
    begin = or_alternative(cost, CALL, ALL, [constant(0.0)]).seconds
    assert fast.algorithm == "wire" and 1e-6 < fast.seconds - begin < 2e-6
    assert fast.seconds > 20e-6  # a kernel, a proxy and eight peers
    assert or_alternative(cost, replace(CALL, backend="gloo"), ALL, [constant(0.0)]) is cost


def test_a_fabric_that_nobody_prices_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"optical-torus is not priced here, accepted with `emulate` and `sweep`"
    ):
        simulate(Function(exchanging, ()), TORUS, Options())


def test_a_fabric_that_cannot_be_planned_is_told_by_its_field() -> None:
    with pytest.raises(UserError, match=r"dims=9x1: topology\.dims: 9x1 has a side of 1"):
        alternatives(load_cluster("v100:9x1,topology=optical-torus,dims=9x1"))
