"""What the twin's rounds carry and learn: FedP2P against FedAvg, for the same bytes too.

Flower's own FedAvg and FedP2P around it, on devices of this machine, in turn in one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median, stdev
from typing import Any

from benchmarks.harness.rows import Row, figure
from windtunnel.edge.federated import SchemeOutcome, plan, run, up

DEVICES, GROUPS, SEEDS, QUICK_SEEDS, ROUNDS, QUICK_ROUNDS = 50, 5, 5, 2, 60, 20
SERVER, DEVICE = 12.5e6, 2.5e6  # 100 and 20 Mb/s
SOURCE = "Chou et al., ECML-PKDD 2021, abstract: about 10 times fewer bytes, about 8 % more accuracy"


def learned(data: str, split: str, scheme: str, quick: bool, **more: Any) -> list[SchemeOutcome]:
    """One scheme with each seed."""
    _, outcomes = run(
        data=data, split=split, schemes=[scheme], devices=DEVICES, groups=GROUPS,
        count=QUICK_ROUNDS if quick else ROUNDS, seeds=QUICK_SEEDS if quick else SEEDS,
        server_link=SERVER, device_link=DEVICE, **more,
    )  # fmt: skip
    return outcomes


def bytes_rows(quick: bool) -> Iterator[Row]:
    """A model of 4 MB."""
    flat, grouped, *_ = plan(
        devices=DEVICES, groups=GROUPS, model_bytes=4e6, server_link=SERVER, device_link=DEVICE
    )
    ratio = flat.cost.server_bytes / grouped.cost.server_bytes
    yield figure(
        "server's link, FedAvg over FedP2P, 50 devices in 5 groups", "x", emulated=ratio, published=10.0,
        source=SOURCE, goal=">= 10 x",
    )  # fmt: skip


def accuracy_rows(quick: bool) -> Iterator[Row]:
    """The mean of the last ten rounds: all 50 devices in 5 groups, against the 5 devices of FedAvg that cost
    the server as much, and against all 50 that cost it ten times as much."""
    for data, split in (("digits", "dirichlet:0.1"), ("synthetic:1,1", "iid")):
        schemes = {
            "FedP2P, 50 devices": learned(data, split, "fedp2p", quick),
            "FedAvg, 5 devices": learned(data, split, "fedavg", quick, sample=GROUPS),
            "FedAvg, 50 devices": learned(data, split, "fedavg", quick),
        }
        means = {}
        for name, outcomes in schemes.items():
            accuracies = [100 * outcome.accuracy for outcome in outcomes]
            means[name], server = mean(accuracies), outcomes[0].rounds[-1].server_bytes
            note = f"± {stdev(accuracies):.1f} over {len(accuracies)} seeds; {server / 1e6:.2f} MB"
            yield figure(f"{data}, {name}", "%", emulated=means[name], note=note)
        gain = means["FedP2P, 50 devices"] - means["FedAvg, 5 devices"]
        yield figure(
            f"{data}, gain for the same bytes", "points", emulated=gain, published=8.0, source=SOURCE
        )


LIVE_GROUPS = 2
MODEL, LINK = 8e6, 2.5e6  # bytes, and 20 Mb/s


def live_rows(quick: bool) -> Iterator[Row]:
    """Bytes that the kernel counted on the server's link, and seconds of a round."""
    rounds = 1 if quick else 3
    for devices in (8,) if quick else (8, 12):
        flat, grouped = (
            up(devices=devices, groups=groups, rounds=rounds, model_bytes=MODEL, server_link=LINK,
               device_link=LINK)
            for groups in (0, LIVE_GROUPS)
        )  # fmt: skip
        name, ratio = f"{devices} devices in 2 groups", flat.server_bytes / grouped.server_bytes
        words, twin = f"{name}: server's link, FedAvg over FedP2P", devices / LIVE_GROUPS
        yield figure(words, "x", ratio, "at least 3.5 x", emulated=twin)
        took = median(flat.round_seconds) / median(grouped.round_seconds)
        yield figure(
            f"{name}: a round, FedAvg over FedP2P", "x", measured=took, goal="at least 2 x",
            note=f"{median(flat.round_seconds):.1f} s over {median(grouped.round_seconds):.1f} s; 8 MB,"
            " links of 20 Mb/s; Flower starts a process for each message, here on two cores",
        )  # fmt: skip
