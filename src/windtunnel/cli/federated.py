"""``windtunnel federated``: learning on devices that keep their data, in groups that spare the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount, seconds, share
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, emit, print_json, print_table, quantity

group = new_group(
    "Federated learning: cost of a round, accuracy by round, and Flower apps in groups (FedP2P)."
)
Devices = Annotated[int, typer.Option(metavar="N", help="Number of devices.")]
Groups = Annotated[int, typer.Option(metavar="N", help="Groups of a round; 0: the best number.")]
ServerLink = Annotated[str, typer.Option(metavar="RATE", help="The server's link, such as 100Mb/s.")]
DeviceLink = Annotated[str, typer.Option(metavar="RATE", help="Each device's link, such as 20Mb/s.")]


def _rate(name: str, text: str) -> float:
    return quantity(name, text, "bytes/s")


@group.command()
def plan(
    devices: Devices = 50,
    groups: Groups = 0,
    model_bytes: Annotated[
        str, typer.Option(metavar="BYTES", help="Size of the model, such as 4MB.")
    ] = "4e6",
    server_link: ServerLink = "100Mb/s",
    device_link: DeviceLink = "20Mb/s",
    as_json: Json = False,
) -> None:
    """Compute what a round of each scheme costs, and whether groups pay.

    Example: windtunnel federated plan --devices 50 --model-bytes 4e6 --server-link 100Mb/s
    """
    from windtunnel.edge.federated import plan as planned

    plans = planned(
        devices=devices, groups=groups, model_bytes=quantity("model_bytes", model_bytes, "bytes"),
        server_link=_rate("server_link", server_link), device_link=_rate("device_link", device_link),
    )  # fmt: skip
    if as_json:
        return print_json({"source": "by formula", "plans": plans})
    rows = [
        (
            row.scheme, str(row.groups), seconds(row.cost.seconds), amount(row.cost.server_bytes),
            amount(row.cost.all_bytes), "yes" if row.pays else "no",
        )
        for row in plans
    ]  # fmt: skip
    head = ("scheme", "groups", "a round", "over the server's link", "over all links", "pays")
    print_table(head, rows, "by formula")


@group.command()
def run(
    data: Annotated[str, typer.Option(help="digits, synthetic:A,B, or a FILE.npz with x and y.")] = "digits",
    split: Annotated[
        str, typer.Option(help="Split of the data: iid, dirichlet:A or shards:K.")
    ] = "dirichlet:0.1",
    scheme: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Scheme: fedavg, fedp2p, hierarchical or gossip.")
    ] = "fedp2p,fedavg",
    model: Annotated[str, typer.Option(help="Model: softmax, mlp or cnn.")] = "softmax",
    devices: Devices = 50,
    groups: Groups = 5,
    sample: Annotated[
        int, typer.Option(metavar="N", help="Devices that are sampled for a round; 0: all.")
    ] = 0,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds.")] = 60,
    epochs: Annotated[int, typer.Option(metavar="N", help="Local epochs of a device in a round.")] = 5,
    weighting: Annotated[str, typer.Option(help="Weight of a device: samples or uniform.")] = "samples",
    grouping: Annotated[
        str, typer.Option(help="Grouping of devices: random, bandwidth or labels.")
    ] = "random",
    exchange: Annotated[str, typer.Option(help="Algorithm of the all-reduce: ring or doubling.")] = "ring",
    seeds: Annotated[int, typer.Option(metavar="N", help="Seeds, each with a split of its own.")] = 1,
    server_link: ServerLink = "100Mb/s",
    device_link: DeviceLink = "20Mb/s",
    as_json: Json = False,
) -> None:
    """Train each scheme on the same samples: accuracy by round, time and bytes. The links are emulated.

    Example: windtunnel federated run --data digits --split dirichlet:0.1 --devices 50 --groups 5
    """
    from windtunnel.cli import progress_bar
    from windtunnel.edge.federated import LocalTraining, Settings, summary
    from windtunnel.edge.federated import run as learned

    if epochs < 1:
        raise UserError(f"`epochs` {epochs}; accepted are whole numbers from 1 up")
    with progress_bar("federated") as progress:
        run_id, outcomes = learned(
            data=data, split=split, schemes=scheme.split(","), model_name=model, devices=devices,
            groups=groups, sample=sample, count=rounds, seeds=seeds,
            server_link=_rate("server_link", server_link), device_link=_rate("device_link", device_link),
            training=LocalTraining(epochs=epochs), progress=progress,
            settings=Settings(weighting=weighting, grouping=grouping, exchange=exchange),
        )  # fmt: skip
    if as_json:
        rows = [
            summary(outcome) | {"curve": [done.accuracy for done in outcome.rounds]} for outcome in outcomes
        ]
        source = "links emulated, learning computed"
        return print_json({"run": run_id, "source": source, "outcomes": rows})
    cells = []
    for outcome in outcomes:
        last = outcome.rounds[-1]
        cells.append((
            outcome.scheme, str(outcome.seed), str(outcome.groups), share(outcome.accuracy),
            seconds(last.seconds), amount(last.server_bytes), amount(last.all_bytes),
        ))  # fmt: skip
    print_table(
        ("scheme", "seed", "groups", "accuracy", "time", "over the server's link", "over all links"), cells
    )


@group.command()
def up(
    app: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Flower app. Default: one that learns digits.")
    ] = None,
    devices: Devices = 8,
    groups: Annotated[int, typer.Option(metavar="N", help="Groups of FedP2P; 0: FedAvg.")] = 2,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds.")] = 3,
    model_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Pad the model to this size.")] = "1MB",
    server_link: ServerLink = "20Mb/s",
    device_link: DeviceLink = "20Mb/s",
    as_json: Json = False,
) -> None:
    """Run a Flower app on emulated devices, each in its own network namespace. Needs root.

    Example: windtunnel federated up --devices 8 --groups 2 --rounds 3 --server-link 20Mb/s
    """
    from windtunnel.edge.federated import up as started

    result = started(
        app=app, devices=devices, groups=groups, rounds=rounds,
        model_bytes=quantity("model_bytes", model_bytes, "bytes"),
        server_link=_rate("server_link", server_link), device_link=_rate("device_link", device_link),
    )  # fmt: skip
    first = (
        f"{result.rounds} rounds in {seconds(result.seconds)}, {amount(result.server_bytes)} over the"
        f" server's link, {amount(result.all_bytes)} over all (measured)"
    )
    emit(as_json, result, (first, *result.events))
