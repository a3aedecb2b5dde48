"""Shares on an interface in a network of its own: put there, changed, lent, and taken away after faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sharing import Place, neighbours, send, shares, veth
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.linux import LinuxError, bpf, network, queues
from windtunnel.linux.cgroup import mounts
from windtunnel.network.sharing.live import attachment, lending, native
from windtunnel.network.sharing.policy import Observation, decide
from windtunnel.network.sharing.policy.meter import RateMeter
from windtunnel.network.sharing.spec import SharingSpec, check

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(network.missing() is not None, reason=network.missing() or ""),
]
MEGABIT = 125e3


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with veth(tmp_path) as place:
        yield place


def rows(interface: attachment.Attachment) -> dict[str, attachment.TenantStatus]:
    return {row.name: row for row in attachment.shown(interface)}


def test_each_gets_what_is_his_and_the_neighbour_notices_nothing(place: Place) -> None:
    interface = place.attach()
    try:
        neighbours(place, "10.9.0.2", "10.9.0.3")
        send(place, "10.9.0.2", 300)
        send(place, "10.9.0.3", 50)
        now = rows(interface)
        wire = 1400 + 8 + 20 + 14
        assert now["slow"].passed + now["slow"].dropped == 300 * wire
        assert 131072 - wire < now["slow"].passed and now["slow"].dropped > 0
        assert (now["rest"].passed, now["rest"].dropped) == (50 * wire, 0)
        assert now["rest"].rate == pytest.approx(0.985 * 100 * MEGABIT - MEGABIT, rel=1e-3)
        assert now["slow"].lent is None and now["others"].rate is None
    finally:
        interface.close()


def test_rates_are_changed_in_the_midst_and_counts_go_on(place: Place) -> None:
    place.attach().close()
    neighbours(place, "10.9.0.2")
    send(place, "10.9.0.2", 200)
    faster = shares()
    faster["entities"]["slow"] |= {"rate": "50 Mb/s", "feedback": "ecn", "mark_at": "60 kB"}
    interface = place.do(lambda: attachment.set_spec("wt0", check(faster, "shares.yaml")))
    now = rows(interface)["slow"]
    interface.close()
    assert now.rate == pytest.approx(50 * MEGABIT, rel=1e-3)
    assert (now.passed + now.dropped, now.mark_at) == (200 * 1442, 60_000)


def test_who_looks_in_the_midst_of_a_change_lends_nothing_by_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface, fill, looks = place.attach(), attachment._fill, list[tuple[Observation, int]]()

    def midst(maps: dict[str, bpf.Map], spec: SharingSpec) -> None:
        change = int(native.read(interface.maps, "common")["change"][0])
        looks.append((lending.looked(interface, RateMeter(), 0.0), change))
        fill(maps, spec)

    monkeypatch.setattr(attachment, "_fill", midst)
    try:
        spec = check(shares(others={"weight": 1}), "shares.yaml")
        place.do(lambda: attachment.set_spec("wt0", spec)).close()
        ((observation, change),) = looks
        assert not lending._put(interface, decide(observation), change, 0.005)
    finally:
        interface.close()


def test_what_is_attached_is_found_by_anybody_and_goes_without_what_others_put_there(place: Place) -> None:
    code = bpf.loaded(
        bpf.BpfProgram("foreign", bytes.fromhex("b7000000ffffffff9500000000000000"), (), "tc"), {}
    )
    try:
        queues.attach("wt1", "egress", code, "foreign", place.file)
        for device in ("wt0", "wt1"):
            place.do(lambda device=device: attachment.attach(device, check(shares(), "x")).close())  # type: ignore[misc]
            (interface,) = place.do(lambda device=device: attachment.opened(device))  # type: ignore[misc]
            assert (interface.hook, interface.by, list(rows(interface))) == (
                "egress",
                "destination",
                ["others", "slow", "rest"],
            )
            interface.close()
            with pytest.raises(
                UserError, match=f"{device} has shares at egress already; accepted is set, or clear"
            ):
                place.do(lambda device=device: attachment.attach(device, check(shares(), "x")))  # type: ignore[misc]
            assert place.do(lambda device=device: attachment.clear(device)) == ["egress"]  # type: ignore[misc]
            assert place.do(lambda device=device: attachment.clear(device)) == []  # type: ignore[misc]
    finally:
        os.close(code)
    assert "ffff:" not in queues.queues("wt0", place.file)  # made for the shares
    assert [rule.name for rule in queues.filters("wt1", place.file)] == ["foreign"]


def test_a_queue_of_others_is_in_the_way_by_name_and_stays(place: Place) -> None:
    network.ask(lambda route: route.tc("add", "ingress", socket.if_nametoindex("wt0")), place.file)
    with pytest.raises(LinuxError, match="wt0 has a queue of kind ingress that is not ours"):
        place.attach()
    assert queues.queues("wt0", place.file)["ffff:"] == "ingress"


def test_what_is_not_there_is_refused_by_name(place: Place) -> None:
    with pytest.raises(UserError, match="there is no interface 'eth9', accepted are lo, wt"):
        place.do(lambda: attachment.attach("eth9", check(shares(), "x")))
    with pytest.raises(UserError, match="wt0 has no shares; accepted is an interface with some"):
        place.do(lambda: attachment.opened("wt0"))
    place.attach().close()
    other = shares()
    other["entities"]["fast"] = other["entities"].pop("slow")
    with pytest.raises(
        UserError, match=r"wt0: entity fast is unknown; accepted are slow, rest in this order"
    ):
        place.do(lambda: attachment.set_spec("wt0", check(other, "x")))
    other = shares()
    other["entities"]["slow"]["match"] = "10.9.0.7/32"
    with pytest.raises(UserError, match="wt0: what belongs to whom is another"):
        place.do(lambda: attachment.set_spec("wt0", check(other, "x")))
    place.do(lambda: attachment.clear("wt0"))
    groups = {"line": 1e9, "by": "cgroup", "entities": {"a": {"match": "/sys/fs/cgroup/no/such"}}}
    with pytest.raises((UserError, LinuxError), match=r"entities\.a\.match is .* a cgroup in|no cgroup v2"):
        place.do(lambda: attachment.attach("wt0", check(groups, "x")))


def test_processes_are_told_apart_by_the_innermost_cgroup_that_is_an_entity(place: Place) -> None:
    try:
        outer = mounts().unified / f"windtunnel-shares-{os.getpid()}"
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    inner, neighbour = outer / "inner", outer / "neighbour"
    inner.mkdir()
    neighbour.mkdir()
    try:
        entities = {"outer": {"match": str(outer)}, "inner": {"match": str(inner)}}
        interface = place.attach(by="cgroup", entities=entities)
        neighbours(place, "10.9.0.2")
        for folder, count in ((inner, 3), (neighbour, 5)):
            code = f"open('{folder}/cgroup.procs', 'w').write('0'); import socket; " + (
                "plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
                f"[plug.sendto(bytes(1400), ('10.9.0.2', 9)) for _ in range({count})]"
            )
            place.do(lambda code=code: subprocess.run([sys.executable, "-c", code], check=True))  # type: ignore[misc]
        now = rows(interface)
        interface.close()
        assert (now["inner"].passed, now["outer"].passed) == (3 * 1442, 5 * 1442)
    finally:
        for folder in (inner, neighbour, outer):
            folder.rmdir()


def test_a_kernel_that_refuses_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> int:
        raise LinuxError("the kernel does not let this process load BPF programs: Operation not permitted")

    monkeypatch.setattr(bpf, "loaded", refused)
    with pytest.raises(LinuxError, match="does not let this process load BPF programs"):
        place.attach()
    assert "ffff:" not in queues.queues("wt0", place.file)


def test_a_killed_lender_leaves_everybody_his_own_rate(place: Place, tmp_path: Path) -> None:
    """kill -9: what was lent ends by itself; clear takes the rest."""
    (tmp_path / "shares.yaml").write_text(json.dumps(shares()))
    lender = place.command("attach", "wt0", tmp_path / "shares.yaml", "--lend", "--log", tmp_path / "log")
    try:
        assert lender.stdout is not None and lender.stdout.readline() == "Attached  wt0, egress\n"
        (interface,) = place.do(lambda: attachment.opened("wt0"))
        try:
            until(lambda: rows(interface)["rest"].lent is not None)
            lender.send_signal(signal.SIGKILL)
            lender.wait()
            until(lambda: rows(interface)["rest"].lent is None)
            assert rows(interface)["slow"].rate == pytest.approx(MEGABIT, rel=1e-2)
        finally:
            interface.close()
    finally:
        lender.kill()
        lender.communicate()
    assert place.do(lambda: attachment.clear("wt0")) == ["egress"]
    assert "ffff:" not in queues.queues("wt0", place.file)


@pytest.mark.parametrize("fault", ["cleared", "gone"])
def test_a_lender_ends_with_what_it_lends_of(place: Place, tmp_path: Path, fault: str) -> None:
    place.attach().close()
    (tmp_path / "shares.yaml").write_text(json.dumps(shares()))
    lender = place.command("set", "wt0", tmp_path / "shares.yaml", "--lend")
    try:
        assert lender.stdout is not None and lender.stdout.readline() == "Set  wt0, egress\n"
        if fault == "cleared":
            assert place.do(lambda: attachment.clear("wt0")) == ["egress"]
        else:
            place.do(lambda: network.remove_link("wt0"))
        output, errors = lender.communicate(timeout=60)
    finally:
        lender.kill()
    if fault == "cleared":
        assert (lender.returncode, output) == (0, "Lends  the shares of wt0 were cleared\n")
    else:
        assert lender.returncode == 1 and "the interface wt0 is gone, and its shares with it" in errors
