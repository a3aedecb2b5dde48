"""Names and files: what they become, and the one sentence for each thing that can be wrong."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return str(file)


def load(tmp_path: Path, text: str) -> Cluster:
    return load_cluster(write(tmp_path, text))


def test_a_name_is_hosts_times_devices() -> None:
    cluster = load_cluster("h100-sxm:16x8")
    assert (cluster.hosts, cluster.devices_per_host, cluster.world_size) == (16, 8, 128)
    assert [cluster.host_of(rank) for rank in (0, 7, 8, 127)] == [0, 0, 1, 15]
    assert [cluster.local_rank(rank) for rank in (0, 7, 8, 127)] == [0, 7, 0, 7]
    assert cluster.host.nvls and cluster.host.intra_switched
    assert cluster == load_cluster(" h100-sxm:16x8 ")
    assert hash(cluster) == hash(load_cluster("h100-sxm:16x8"))


def test_a_smaller_host_keeps_its_nics_for_each_device() -> None:
    assert (load_cluster("h100-sxm:2x4").host.nics, load_cluster("h100-sxm:2x4").host.cpu_cores) == (4, 56)
    assert load_cluster("t4:2x1").host.nics == 1


def test_what_ifs_behind_commas() -> None:
    cluster = load_cluster("h100-sxm:16x8,nic=ib-200,topology=fat-tree-2,oversubscription=4,price=2.5")
    assert cluster.host.nic.bandwidth == 25e9
    assert (cluster.topology.kind, cluster.topology.oversubscription) == ("fat-tree-2", 4.0)
    assert cluster.price_per_device_hour == 2.5
    # A leaf with 32 ports down takes 4 hosts of 8 NICs, where a rail switch takes 32 hosts.
    assert cluster.topology.hosts_per_leaf == 4
    assert load_cluster("h100-sxm:4x8,nic=roce-400").topology.hop_latency == 0.6e-6
    assert not load_cluster("h100-sxm:2x8,intra=nvlink-3").host.nvls
    assert load_cluster("h100-sxm:8x8,topology=torus,dims=2x4").topology.dims == (2, 4)


def test_a_cpu_is_measured_and_its_memory_shared() -> None:
    whole, quarter = load_cluster("cpu:1x1").host.device, load_cluster("cpu:2x4").host.device
    assert whole.kind == "cpu"
    assert quarter.memory_bytes == whole.memory_bytes / 4
    assert "measured" in whole.sources["memory_bandwidth"]
    assert whole.peak("float32") > 0 and whole.peak("int8") == whole.peak("float32")


def test_a_file_overrides_its_base(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        """
name: ours
base: h100-sxm:16x8
hosts: 4
host:
  device: {memory_bytes: 94 GB, peak_flops: {bfloat16: 900 TFLOP/s}}
  nic: {base: roce-200, efficiency: 0.8}
  intra: {bandwidth: 400 GB/s}
topology: {kind: fat-tree-3, oversubscription: 2, hosts_per_leaf: 2, leaves_per_pod: 1}
""",
    )
    assert (cluster.name, cluster.hosts, cluster.devices_per_host) == ("ours", 4, 8)
    device = cluster.host.device
    assert (device.memory_bytes, device.peak_flops["bfloat16"]) == (94e9, 900e12)
    assert device.peak_flops["float32"] == 66.9e12
    assert device.sources["memory_bytes"].endswith("mine.yaml")
    assert "whitepaper" in device.sources["peak_flops.float32"]
    assert (cluster.host.nic.bandwidth, cluster.host.nic.efficiency) == (25e9, 0.8)
    assert (cluster.host.intra.bandwidth, cluster.host.intra.name) == (400e9, "nvlink-4")
    assert cluster.placement(range(32)).tier == 3


def test_a_file_takes_what_ifs_too(tmp_path: Path) -> None:
    file = write(tmp_path, "name: ours\nbase: h100-sxm:16x8\n")
    cluster = load_cluster(f"{file},nic=ib-200")
    assert (cluster.host.nic.name, cluster.name) == ("ib-200", "ours,nic=ib-200")


CUSTOM = """
hosts: 3
host:
  device:
    name: dream
    sm_count: 10
    memory_bytes: 10 GiB
    memory_bandwidth: 1 TB/s
    l2_bytes: 8 MiB
    peak_flops: {float32: 1e13, bfloat16: 100 TFLOP/s}
  devices: 2
  intra: {bandwidth: 100 GB/s, latency: 1 us}
  nic: {bandwidth: 100 Gb/s, latency: 2 us}
  pcie: pcie-5
"""


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    cluster = load(tmp_path, CUSTOM)
    assert cluster.host.device.torch_name == "dream"
    assert cluster.host.device.memory_bytes == 10 * 2**30
    assert (cluster.host.nic.bandwidth, cluster.host.nic.latency) == (12.5e9, 2e-6)
    assert cluster.topology.kind == "single-switch"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "the cluster is empty"),
        ("h100:16x8", "no device 'h100', did you mean h100-sxm? accepted are v100, t4"),
        ("zzz:1x1", "accepted are v100"),
        ("h100-sxm", "the size is missing, accepted is h100-sxm:HOSTSxDEVICES"),
        ("h100-sxm:16", "the size is missing"),
        ("h100-sxm:16x8x2", "the size is missing"),
        ("h100-sxm:-1x8", "the size is missing"),
        ("h100-sxm:16x9", "9 devices in a host, accepted for h100-sxm is 1 to 8"),
        ("h100-sxm:16x0", "0 devices in a host"),
        ("h100-sxm:0x8", "0 hosts, accepted is 1 to 100000"),
        ("nowhere.yaml", "there is no such file"),
        ("h100-sxm:16x8,", "accepted is key=value"),
        ("h100-sxm:16x8,nic", "accepted is key=value"),
        ("h100-sxm:16x8,nik=ib-200", "option nik is unknown, did you mean nic? accepted are nic"),
        ("h100-sxm:16x8,nic=ib-200,nic=ib-400", "option nic is given twice"),
        ("h100-sxm:16x8,nic=ib-300", "host.nic is 'ib-300', did you mean ib-"),
        ("h100-sxm:16x8,nic=nvlink-4", "accepted are ib-100"),
        ("h100-sxm:16x8,intra=ib-400", "accepted are nvlink-2"),
        ("h100-sxm:16x8,nics=0", "host.nics is '0', accepted is a number from 1 up"),
        ("h100-sxm:16x8,nics=1.5", "accepted is a whole number"),
        ("h100-sxm:16x8,topology=ring", "topology.kind is 'ring', accepted is 'single-switch'"),
        ("h100-sxm:16x8,oversubscription=half", "is 'half', accepted is a number"),
        ("h100-sxm:16x8,oversubscription=0.5", "accepted is a number from 1 up"),
        ("h100-sxm:16x8,oversubscription=nan", "accepted is"),
        ("h100-sxm:16x8,topology=single-switch,oversubscription=2", "has no uplinks"),
        ("h100-sxm:16x8,topology=torus", "dims is missing, accepted for a torus of 16 hosts"),
        ("h100-sxm:16x8,topology=torus,dims=4x5", "is 4x5, .*product is 16, such as 4x4"),
        ("h100-sxm:16x8,topology=torus,dims=4xq", "'q', accepted is a whole number"),
        ("h100-sxm:16x8,dims=4x4", "only where topology.kind is torus"),
        ("h100-sxm:16x8,hop_latency=fast", "accepted is a number from 0 up of seconds"),
    ],
)
def test_wrong_names_are_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?")) as caught:
        load_cluster(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a cluster file holds None, accepted is a mapping"),
        ("- a\n", "accepted is a mapping"),
        ("a: [1", "line 1, column [0-9]+: not valid YAML"),
        ("hosts: 1\nhosts: 2\n", "line 2, column 1: not valid YAML .field hosts is given twice"),
        (
            "base: h100-sxm:16x8\nhots: 2\n",
            "field hots is unknown, did you mean hosts? accepted are base, name",
        ),
        ("base: h100-sxm:16x8\nhost: {niks: 2}\n", "field host.niks is unknown, did you mean nics?"),
        ("base: h100-sxm:16x8\nhost: {nic: {rate: 2}}\n", "field host.nic.rate is unknown.*bandwidth"),
        ("base: h100-sxm:16x8\nhost: 3\n", "host is 3, accepted is a mapping of fields"),
        ("base: h100-sxm:16x8\nhost:\n", "host is None, accepted is a mapping"),
        ("base: 7\n", "base is 7, accepted is text"),
        ("base: h100-sxm:16x9\n", "base is 'h100-sxm:16x9': 9 devices in a host"),
        ("base: h100-sxm:16x8\nhosts: 0\n", "hosts is 0, accepted is a number from 1 up"),
        ("base: h100-sxm:16x8\nhosts: 1000000000\n", "accepted is a number at most 100000"),
        ("base: h100-sxm:16x8\nhosts: true\n", "hosts is True, accepted is a whole number"),
        ("base: h100-sxm:16x8\nhosts: many\n", "hosts is 'many', accepted is a whole number"),
        ("base: h100-sxm:16x8\nhost: {nvls: 7}\n", "accepted is true or false"),
        ("base: h100-sxm:16x8\nhost: {nic: ib}\n", "host.nic is 'ib', did you mean ib-100?"),
        (
            "base: h100-sxm:16x8\nhost: {nic: {bandwidth: 400 Gx/s}}\n",
            "bandwidth is '400 Gx/s', accepted is a pos",
        ),
        ("base: h100-sxm:16x8\nhost: {nic: {bandwidth: -1}}\n", "accepted is a positive number of bytes/s"),
        ("base: h100-sxm:16x8\nhost: {nic: {efficiency: 1.5}}\n", "accepted is a number at most 1"),
        ("base: h100-sxm:16x8\nhost: {device: h1000}\n", "host.device is 'h1000', did you mean h100-"),
        ("base: h100-sxm:16x8\nhost: {device: {kind: tpu}}\n", "accepted is 'gpu' or 'cpu'"),
        (
            "base: h100-sxm:16x8\nhost: {device: {capability: [9]}}\n",
            "accepted is a list of two whole numbers",
        ),
        ("base: h100-sxm:16x8\nhost: {device: {capability: 9.0}}\n", "accepted is a list"),
        (
            "base: h100-sxm:16x8\nhost: {device: {peak_flops: {bf16: 1}}}\n",
            "peak_flops.bf16 .*accepted is 'float64'",
        ),
        ("base: h100-sxm:16x8\nhost: {device: {peak_flops: 3}}\n", "accepted is a mapping of dtypes"),
        ("base: h100-sxm:16x8\ntopology: {dims: 4}\n", "dims is 4, accepted is the size of each dimension"),
        ("base: h100-sxm:16x8\nprice_per_device_hour: -2\n", "accepted is a number from 0 up"),
        ("base: h100-sxm:16x8\n3: 4\n", "a field is called 3, accepted is text"),
        ("host: {device: t4, devices: 2}\n", "hosts is missing, accepted is a whole number"),
        ("hosts: 2\nhost: {device: t4}\n", "host.devices is missing"),
        ("hosts: 2\nhost: {devices: 2}\n", "host.device is missing, accepted are v100"),
        (CUSTOM.replace("    sm_count: 10\n", ""), "host.device.sm_count is missing"),
        (CUSTOM.replace("float32: 1e13, ", ""), "host.device.peak_flops.float32 is missing"),
        (CUSTOM.replace("  pcie: pcie-5\n", ""), "host.pcie is missing, accepted are nvlink-2"),
        (CUSTOM.replace(", latency: 2 us", ""), "host.nic.latency is missing"),
    ],
)
def test_wrong_files_are_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UserError, match=words.replace("?", r"\?")) as caught:
        load_cluster(file)
    assert str(caught.value).startswith(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_cluster(str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match="cannot be read"):
        load_cluster(f"{tmp_path}/")


@example("/\x00")
@given(st.text(max_size=40))
def test_any_text_is_a_cluster_or_a_user_error(text: str) -> None:
    try:
        assert load_cluster(text).world_size >= 1
    except UserError as error:
        assert str(error)
