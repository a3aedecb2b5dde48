"""Programs that make traffic for the benches: requests wait for bulk flows, and who ends early is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network import traffic
from windtunnel.base.errors import HostError
from windtunnel.linux import namespaces, network


def test_a_program_that_ends_early_is_named_with_its_status() -> None:
    with (
        traffic.started(None, "ask", "nowhere.invalid") as process,
        pytest.raises(HostError, match=r"ask nowhere\.invalid: ended with status 1 and has not said"),
    ):
        traffic.line(process)


@pytest.mark.root
def test_who_asks_is_connected_before_bulk_flows_begin(tmp_path: Path) -> None:
    if (why := network.missing()) is not None:
        pytest.skip(why)
    place = tmp_path / "netns"
    namespaces.make_network(place)
    try:
        with traffic.started(place, "answer") as answers:
            traffic.line(answers)
            with traffic.started(place, "ask", "127.0.0.1") as asks:
                assert traffic.line(asks) == "connected\n"
                for word in ("go", "end"):
                    traffic.say(asks, word)
                assert json.loads(traffic.line(asks))
    finally:
        namespaces.release(place)
