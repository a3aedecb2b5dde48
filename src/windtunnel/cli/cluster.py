"""``windtunnel cluster list|show|validate``: what the catalogue has, and what a name or file means."""

from dataclasses import asdict

import typer
from rich.console import Console

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, print_json, print_table
from windtunnel.cluster import catalogue
from windtunnel.cluster.draw import example_groups, figures, picture, plain, si, topology_text
from windtunnel.cluster.load import load_cluster

TOPOLOGIES = {
    "single-switch": "every host on one switch",
    "rail-optimised": "NIC i of every host under a leaf on leaf switch i, spines above",
    "fat-tree-2": "all NICs of a host on one leaf switch, one layer of spines above",
    "fat-tree-3": "as fat-tree-2, in pods joined by core switches",
    "torus": "hosts joined to their neighbours, without switches; needs dims",
    "optical-torus": "a torus in which light can pass hosts, a wavelength for each pair; needs dims",
}

group = new_group("Show the hardware catalogue, and check cluster files.")


@group.command("list")
def list_catalogue(as_json: Json = False) -> None:
    """List the available devices, links, hosts and topologies.

    Example: windtunnel cluster list
    """
    kinds = {name: catalogue.host_kind(name) for name in catalogue.device_names()}
    links = {name: catalogue.link(name) for name in catalogue.link_names()}
    if as_json:
        hosts = {name: asdict(kind) for name, kind in kinds.items()}
        data = {"hosts": hosts, "links": {name: asdict(link) for name, link in links.items()}}
        return print_json(data | {"topologies": TOPOLOGIES}, indent=2)
    devices = []
    for name, kind in kinds.items():
        device = kind.host.device
        fp8, watts = device.peak_flops.get("float8_e4m3fn"), device.power_watts
        devices.append((
            name, si(device.memory_bytes, "B"), si(device.memory_bandwidth, "B/s"),
            f"{device.peak('bfloat16') / 1e12:.4g}", f"{fp8 / 1e12:.5g}" if fp8 else "-",
            f"{device.peak('float32') / 1e12:.4g}", si(watts, "W") if watts else "-",
        ))  # fmt: skip
    print_table(
        ("name", "memory", "bandwidth", "bf16 TFLOP/s", "fp8", "fp32", "power"), devices,
        "Devices (dense peaks)",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (name, f"1 to {host.devices}", host.intra.name, f"{host.nics} x {host.nic.name}", topology.kind)
        for name, (host, topology) in ((name, (kind.host, kind.topology)) for name, kind in kinds.items())
    ]
    print_table(("name", "devices", "inside", "NICs", "topology"), rows, "Hosts (NAME:HOSTSxDEVICES)")
    networks = catalogue.link_names(network=True)
    rows = [
        (
            name, si(link.bandwidth, "B/s"), si(link.latency, "s"), f"{link.efficiency:.0%}",
            "network" if name in networks else "host",
        )
        for name, link in links.items()
    ]  # fmt: skip
    print_table(("name", "rate", "latency", "reaches", "place"), rows, "Links (one direction)")
    note = "Published figures, but for cpu, which is measured; `windtunnel cluster show` names the sources."
    print_table(("name", "what it is"), TOPOLOGIES.items(), "Topologies", note)


@group.command()
def show(
    cluster: str = typer.Argument(help="A name such as h100-sxm:16x8,nic=ib-200, or a YAML file."),
    as_json: Json = False,
) -> None:
    """Draw a cluster, and show its figures with their sources.

    Example: windtunnel cluster show h100-sxm:16x8,nic=ib-200
    """
    model = load_cluster(cluster)
    if as_json:
        return print_json(plain(model), indent=2)
    console = Console(highlight=False)
    console.print(picture(model), markup=False, overflow="ignore", no_wrap=True)
    groups = [
        (
            name, str(placement.tier),
            si(placement.intra_bandwidth, "B/s") if placement.intra else "-",
            si(placement.inter_bandwidth, "B/s") if placement.inter else "-", si(placement.latency, "s"),
        )
        for name, placement in example_groups(model)
    ]  # fmt: skip
    if groups:
        head = ("group", "tier", "in the host", "between hosts", "latency")
        print_table(head, groups, "What a group of ranks crosses, line rates for each rank")
    sources: dict[str, int] = {}
    rows = [
        (figure, value, str(sources.setdefault(source, len(sources) + 1)))
        for figure, value, source in figures(model)
    ]
    print_table(("figure", "value", "source"), rows, "Figures")
    for source, number in sources.items():
        console.print(f"({number}) {source}", markup=False, soft_wrap=True)


@group.command()
def validate(file: str = typer.Argument(help="A cluster file (YAML) or a name.")) -> None:
    """Check a cluster file. Exit status 2, with one sentence, when it is wrong.

    Example: windtunnel cluster validate ours.yaml
    """
    model = load_cluster(file)
    size = f"{model.hosts} x {model.devices_per_host} {model.host.device.name}"
    typer.echo(f"{file}: OK, {size}, {topology_text(model)}")
