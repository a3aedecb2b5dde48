"""What a host has for networks, and what is said where it lacks it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.linux import bpf, network, probe


def probed() -> dict[str, probe.HostFeature]:
    return {feature.name: feature for feature in probe.probed()}


def test_without_root_nothing_that_needs_it_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    features = probed()
    assert features["root"].missing == "this process is not root"
    assert features["queue htb"].missing == "network namespaces need root"
    assert not features["BPF locks"].present and not features["queue clsact"].present


def test_a_kernel_without_types_has_no_congestion_controls_in_bpf(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bpf, "VMLINUX", tmp_path / "none")
    features = probed()
    assert features["BTF"].missing == features["struct_ops"].missing == "No such file or directory"


@pytest.mark.root
@pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")
def test_a_queue_that_no_kernel_has_is_missing_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "QUEUES", {"tbf": "links", "nosuch": "nothing"})
    features = probed()
    if not features["namespaces"].present:
        pytest.skip(features["namespaces"].missing)
    assert features["queue nosuch"].missing == "the kernel has no queue of this kind"
    left = [name for name in os.listdir("/sys/class/net") if name.startswith("wtp")]
    assert left == []  # other tests have interfaces of their own


def test_the_verb_prints_it_as_one_value() -> None:
    done = CliRunner().invoke(app, ["network", "probe", "--json"])
    assert done.exit_code == 0, done.output
    features = json.loads(done.stdout)
    assert {"name", "gives", "missing", "present"} == set(features[0])
    assert all(feature["present"] == (feature["missing"] == "") for feature in features)
