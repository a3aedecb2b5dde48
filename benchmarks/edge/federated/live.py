"""Flower's own FedAvg and FedP2P around it, on devices of this machine, in turn in one run."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.harness.measure import conditions
from benchmarks.harness.rows import Row, figure
from windtunnel.edge.federated import up

GROUPS, ROUNDS, QUICK_ROUNDS = 2, 3, 1
MODEL, LINK = 8e6, 2.5e6  # bytes, and 20 Mb/s


def live_rows(quick: bool) -> Iterator[Row]:
    """Bytes that the kernel counted on the server's link, seconds of a round, and the accuracy of both."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for devices in (8,) if quick else (8, 12):
        load = conditions()
        flat, grouped = (
            up(devices=devices, groups=groups, rounds=rounds, model_bytes=MODEL, server_link=LINK,
               device_link=LINK)
            for groups in (0, GROUPS)
        )  # fmt: skip
        name, ratio = f"{devices} devices in 2 groups", flat.server_bytes / grouped.server_bytes
        yield figure(
            f"{name}: server's link, FedAvg over FedP2P", "x", measured=ratio, emulated=devices / GROUPS,
            goal="at least 3.5 x", note=load,
        )  # fmt: skip
        took = median(flat.round_seconds) / median(grouped.round_seconds)
        yield figure(
            f"{name}: a round, FedAvg over FedP2P", "x", measured=took, goal="at least 2 x",
            note=f"{median(flat.round_seconds):.1f} s over {median(grouped.round_seconds):.1f} s; 8 MB,"
            " links of 20 Mb/s; Flower starts a process for each message, here on two cores",
        )  # fmt: skip
        yield figure(
            f"{name}: accuracy after the last round, FedP2P less FedAvg", "points",
            measured=100 * (grouped.accuracy[-1] - flat.accuracy[-1]),
        )  # fmt: skip
