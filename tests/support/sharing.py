"""A network of one's own with an interface to share, and packets through it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.waiting import until
from windtunnel.linux import bpf, namespaces, network, queues
from windtunnel.network.sharing.live import attachment
from windtunnel.network.sharing.live.lending import lend
from windtunnel.network.sharing.spec import check
from windtunnel.store import eventlog

T = TypeVar("T")
MAIN = "from windtunnel.cli.main import main; main()"


def shares(**more: Any) -> dict[str, Any]:
    entities = {
        "slow": {"match": "10.9.0.2/32", "rate": "1 Mb/s", "limit": 131072},
        "rest": {"match": "10.9.0.0/24"},
    }
    return {"line": "100 Mb/s", "by": "destination", "entities": entities, **more}


@dataclass
class Place:
    """A network with the interface ``wt0``; its peer is in the same one."""

    file: Path

    def do(self, work: Callable[[], T]) -> T:
        return namespaces.within(self.file, work)

    def attach(self, **more: Any) -> attachment.Attachment:
        return self.do(lambda: attachment.attach("wt0", check(shares(**more), "shares.yaml")))

    def command(self, *words: str | Path) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", MAIN, "network", "sharing", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.do(lambda: subprocess.Popen(line, **pipes))  # type: ignore[call-overload, no-any-return]


@contextmanager
def veth(folder: Path) -> Iterator[Place]:
    """Skips, by name, where there can be none."""
    if (reason := network.missing()) is not None:
        pytest.skip(reason)
    place = Place(folder / "netns")
    namespaces.make_network(place.file)
    try:
        pair = {"ifname": "wt1"}
        network.ask(lambda route: route.link("add", ifname="wt0", kind="veth", peer=pair), place.file)
        network.configure("wt0", "10.9.0.1", 24, place.file)
        place.do(lambda: network.set_link("wt1", up=True))
        queues.make_clsact("wt1", place.file)
        os.close(bpf.Map(bpf.LPM_TRIE, 20, 4, 1).fd)
    except OSError as error:
        namespaces.release(place.file)
        pytest.skip(f"links, clsact or BPF cannot be had here: {error}")
    try:
        yield place
    finally:
        namespaces.release(place.file)


def neighbours(place: Place, *addresses: str) -> None:
    """Packets to these need not ask for whose they are."""

    def know(route: Any) -> None:
        for address in addresses:
            index = socket.if_nametoindex("wt0")
            route.neigh("replace", dst=address, lladdr="02:00:00:00:00:01", ifindex=index, state=0x80)

    network.ask(know, place.file)


def send(place: Place, address: str, count: int) -> None:
    def out() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
            for _ in range(count):
                plug.sendto(bytes(1400), (address, 9))

    place.do(out)


def lent(folder: Path) -> Path:
    """The log of a lender, of two entities of which one sends."""
    with veth(folder) as place:
        halves = {name: {"match": f"10.9.0.{name}"} for name in ("2", "3")}
        interface, stop, log = place.attach(entities=halves), threading.Event(), folder / eventlog.NAME
        neighbours(place, "10.9.0.3")
        lender = threading.Thread(target=lambda: place.do(lambda: lend(interface, log=log, stop=stop)))
        lender.start()
        try:

            def offered() -> bool:
                send(place, "10.9.0.3", 20)
                observations = [event["observation"]["entities"] for event in eventlog.decisions(log)]
                return any(entity["offered"] > 1e5 for entities in observations for entity in entities)

            until(offered)
        finally:
            stop.set()
            lender.join()
            interface.close()
    return log
