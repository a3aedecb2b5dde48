"""``windtunnel cluster list|show|validate``: what the catalogue has, and what a name or file means."""

import json
from dataclasses import asdict

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from windtunnel.cli import Group
from windtunnel.cluster import catalogue
from windtunnel.cluster.draw import example_groups, figures, picture, plain, si, topology_text
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import TOPOLOGY_KINDS

TOPOLOGIES = {
    "single-switch": "every host on one switch",
    "rail-optimised": "NIC i of every host under a leaf on leaf switch i, spines above",
    "fat-tree-2": "all NICs of a host on one leaf switch, one layer of spines above",
    "fat-tree-3": "as fat-tree-2, in pods joined by core switches",
    "torus": "hosts joined to their neighbours, without switches; needs dims",
    "optical-torus": "a torus in which light can pass hosts, a wavelength for each pair; needs dims",
}

app = typer.Typer(cls=Group, no_args_is_help=True, help="The hardware catalogue, and cluster files.")


@app.command("list")
def list_catalogue(as_json: bool = typer.Option(False, "--json", help="Print plain data.")) -> None:
    """List the devices, links, hosts and topologies that a cluster can be made of.

    Example: windtunnel cluster list
    """
    kinds = {name: catalogue.host_kind(name) for name in catalogue.device_names()}
    links = {name: catalogue.link(name) for name in catalogue.link_names()}
    if as_json:
        hosts = {name: asdict(kind) for name, kind in kinds.items()}
        data = {"hosts": hosts, "links": {name: asdict(link) for name, link in links.items()}}
        typer.echo(json.dumps(data | {"topologies": TOPOLOGIES}, indent=2))
        return
    console = Console()
    devices = _table(
        "Devices (dense peaks)", "name", "memory", "bandwidth", "bf16 TFLOP/s", "fp8", "fp32", "power"
    )
    hosts_table = _table("Hosts (NAME:HOSTSxDEVICES)", "name", "devices", "inside", "NICs", "topology")
    for name, kind in kinds.items():
        device, host = kind.host.device, kind.host
        fp8 = device.peak_flops.get("float8_e4m3fn")
        devices.add_row(
            name, si(device.memory_bytes, "B"), si(device.memory_bandwidth, "B/s"),
            f"{device.peak('bfloat16') / 1e12:.4g}", f"{fp8 / 1e12:.5g}" if fp8 else "-",
            f"{device.peak('float32') / 1e12:.4g}",
            si(device.power_watts, "W") if device.power_watts else "-",
        )  # fmt: skip
        nics = f"{host.nics} x {host.nic.name}"
        most = f"1 to {host.devices}"
        hosts_table.add_row(name, most, host.intra.name, nics, kind.topology.kind)
    links_table = _table("Links (one direction)", "name", "rate", "latency", "reaches", "place")
    networks = catalogue.link_names(network=True)
    for name, link in links.items():
        where = "network" if name in networks else "host"
        rate, latency = si(link.bandwidth, "B/s"), si(link.latency, "s")
        links_table.add_row(name, rate, latency, f"{link.efficiency:.0%}", where)
    topologies = _table("Topologies", "name", "what it is")
    for topology in TOPOLOGY_KINDS:
        topologies.add_row(topology, TOPOLOGIES[topology])
    for table in (devices, hosts_table, links_table, topologies):
        console.print(table)
    console.print(
        "Published figures, but for cpu, which is measured; `windtunnel cluster show` names the sources."
    )


@app.command()
def show(
    cluster: str = typer.Argument(help="A name such as h100-sxm:16x8,nic=ib-200, or a YAML file."),
    as_json: bool = typer.Option(False, "--json", help="Print plain data."),
) -> None:
    """Draw a cluster, and tell its figures with their sources.

    Example: windtunnel cluster show h100-sxm:16x8,nic=ib-200
    """
    found = load_cluster(cluster)
    if as_json:
        typer.echo(json.dumps(plain(found), indent=2))
        return
    console = Console(highlight=False)
    console.print(picture(found), markup=False, overflow="ignore", no_wrap=True)
    title = "What a group of ranks crosses, line rates for each rank"
    groups = _table(title, "group", "tier", "in the host", "between hosts", "latency")
    for name, placement in example_groups(found):
        inside = si(placement.intra_bandwidth, "B/s") if placement.intra else "-"
        between = si(placement.inter_bandwidth, "B/s") if placement.inter else "-"
        groups.add_row(name, str(placement.tier), inside, between, si(placement.latency, "s"))
    if groups.row_count:
        console.print(groups)
    table = _table("Figures", "figure", "value", "source")
    sources: dict[str, int] = {}
    for figure, value, source in figures(found):
        number = sources.setdefault(source, len(sources) + 1)
        table.add_row(figure, value, str(number))
    console.print(table)
    for source, number in sources.items():
        console.print(f"({number}) {source}", markup=False, soft_wrap=True)


@app.command()
def validate(file: str = typer.Argument(help="A cluster file (YAML) or a name.")) -> None:
    """Check a cluster file: one line when it is right, one sentence and exit status 2 when it is not.

    Example: windtunnel cluster validate ours.yaml
    """
    found = load_cluster(file)
    size = f"{found.hosts} x {found.devices_per_host} {found.host.device.name}"
    typer.echo(f"{file}: OK, {size}, {topology_text(found)}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def register(root: typer.Typer) -> None:
    """Add the verb to ``root``."""
    root.add_typer(app, name="cluster")
