"""A real device and broker: who may do what, what the host can see, and what is left when somebody ends."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support import gpu as support
from support.waiting import until
from windtunnel.base.errors import HostError, UserError
from windtunnel.trust.attest import AllowList, AttestationRefused, Manufacturer, Verifier
from windtunnel.trust.gpu import Buffer, Denied, GpuHost, claim
from windtunnel.trust.gpu.live.link import GpuLink


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuHost]:
    with support.host(tmp_path_factory.mktemp("gpu")) as gpu:
        yield gpu


@pytest.mark.parametrize("path", ["plain", "double", "single", "pipelined"])
def test_data_go_in_and_results_come_out(host: GpuHost, path: str) -> None:
    with host.claim(path) as gpu:
        support.all_paths(gpu)


def test_a_second_claim_is_refused_until_the_first_is_released(host: GpuHost) -> None:
    with host.claim() as gpu:
        with pytest.raises(Denied, match="owns the device in epoch") as refused, host.claim():
            pass
        assert refused.value.refusal == "owned"
        support.all_paths(gpu)
    with host.claim() as later:
        assert later.epoch == gpu.epoch + 1


def test_who_is_not_the_owner_touches_nothing(host: GpuHost) -> None:
    with host.claim("single") as gpu:
        buffer = gpu.array(np.arange(10))
        other = GpuLink(host.spec["broker"]["address"], Verifier(host.allow))
        me, copy = host.me(), {"path": "plain", "into": False, "offset": 0, "length": 8, "bell": 0}
        with pytest.raises(UserError, match="before the user has proven"):
            other.call("copy", epoch=gpu.epoch, **copy)
        m2 = me.answer(bytes.fromhex(other.call("challenge")["m1"]))
        other.call("proven", m4=me.accept(bytes.fromhex(other.call("prove", m2=m2.hex())["m3"])).hex())
        for call, refusal in ((gpu.epoch, "foreign"), (gpu.epoch - 1, "stale")):
            with pytest.raises(Denied) as refused:
                other.call("copy", epoch=call, **copy)
            assert refused.value.refusal == refusal
        with pytest.raises(Denied, match="not the broker") as refused:  # past the broker, in the owner's name
            owner = support.decided(host, "claim")[-1]["decision"]["table"]["owner"]
            direct(host).call("copy", who=owner, epoch=gpu.epoch, **copy)
        assert refused.value.refusal == "unbound"
        with pytest.raises(Denied, match="not registered") as refused:
            gpu.call("copy", **{**copy, "offset": 1 << 20})
        assert refused.value.refusal == "page"
        assert np.array_equal(gpu.read(buffer), np.arange(10))
        other.close()


def direct(host: GpuHost) -> GpuLink:
    """A connection to the device that is not its broker's."""
    return GpuLink(host.spec["device"]["address"], Verifier(host.spec["broker"]["devices"]))


def test_nobody_else_is_bound_and_whoever_proves_another_thing_is_refused(host: GpuHost) -> None:
    with pytest.raises(Denied, match="is bound until a cold reset"):
        direct(host).call("bind")
    address = host.spec["broker"]["address"]
    other = AllowList((Manufacturer().root,), host.allow.measurements)
    with pytest.raises(AttestationRefused, match="roots"), claim(address, other, host.me()):
        pass
    stranger = host.me.func(Manufacturer().fuse(), *host.me.args[1:])
    with pytest.raises(ConnectionError), claim(address, host.allow, stranger):
        pass
    assert support.free(host)


def test_a_release_needs_a_scrub_and_the_next_user_finds_zeros(host: GpuHost) -> None:
    with host.claim("single") as gpu:
        gpu.array(np.full(1000, 7))
        with pytest.raises(Denied, match="not scrubbed") as refused:
            gpu.call("release")
        assert refused.value.refusal == "unscrubbed"
    with host.claim("single") as gpu:
        assert not gpu.read(gpu.empty((1000,), "int64")).any()


def test_a_changed_chunk_is_refused(host: GpuHost) -> None:
    with host.claim("single") as gpu:
        buffer = gpu.array(np.arange(100))
        gpu.read(buffer)
        gpu._puts.put(b"", "", memoryview(bytearray(16)))  # the host has left one out
        with pytest.raises(Denied, match="not what was sealed") as refused:
            gpu.write(buffer, np.arange(100))
        assert refused.value.refusal == "changed"
    with host.claim("double") as gpu:
        buffer = gpu.array(np.arange(100))
        gpu._takes._count += 1
        with pytest.raises(Denied, match="not what was sealed"):
            gpu.read(buffer)


def test_a_refusal_of_a_pipelined_copy_is_told_and_nobody_waits_for_its_bells(host: GpuHost) -> None:
    content = np.random.default_rng(1).random((5 << 18,), np.float32)  # 20 chunks
    with host.claim("pipelined") as gpu:
        buffer = gpu.array(content)
        beyond = Buffer(buffer.offset + (1 << 23), buffer.shape, buffer.dtype)
        for _ in range(2):
            with pytest.raises(Denied, match="not registered"):
                gpu.read(beyond)
            assert np.array_equal(gpu.read(buffer), content)
        with pytest.raises(Denied, match="not registered"):
            gpu.write(beyond, content)
    with host.claim("pipelined") as gpu:
        buffer = gpu.array(content)
        gpu._puts.put(b"", "", memoryview(bytearray(16)))
        with pytest.raises(Denied, match="not what was sealed"):
            gpu.write(buffer, content)
        assert not gpu.read(buffer)[: 1 << 16].any(), "of a changed chunk nothing is left"


@pytest.mark.parametrize("path", ["double", "single", "pipelined"])
def test_a_secret_is_not_in_memory_that_the_host_sees(host: GpuHost, path: str) -> None:
    secret = secrets.token_bytes(1 << 10)

    def shared() -> list[bytes]:
        return [each.read_bytes() for each in Path(host.spec["broker"]["folder"]).glob("shared-*")]

    before = shared()
    with host.claim(path) as gpu:
        buffer = gpu.array(np.frombuffer(secret, np.uint8))
        assert gpu.read(buffer).tobytes() == secret
        changed = [content != old for content, old in zip(shared(), before, strict=True)]
        assert sum(changed) == (2 if path == "double" else 1), "it did pass through here"
        assert not any(secret[at : at + 16] in content for content in shared() for at in range(0, 1024, 128))
    with host.claim("plain") as gpu:  # what the search would find
        gpu.array(np.frombuffer(secret, np.uint8))
        assert gpu._shared.path.read_bytes()[: len(secret)] == secret


def test_requests_that_are_none_are_told(host: GpuHost) -> None:
    with host.claim("single") as gpu:
        x, y = gpu.array(np.ones(4, "float32")), gpu.empty((4,), "float32")
        with pytest.raises(UserError, match="'nothing' is unknown"):
            gpu.run("nothing", [x], [y])
        with pytest.raises(UserError, match="'fail' failed: RuntimeError: not today"):
            gpu.run("fail", [x], [y])
        with pytest.raises(UserError, match="`content` is"):
            gpu.write(x, np.ones(5, "float32"))
        with pytest.raises(Denied, match="are not of the device's"):
            gpu.empty((1 << 30,), "float32")
    with pytest.raises(UserError, match="'triple' is unknown; accepted are plain"), host.claim("triple"):
        pass
    with pytest.raises(UserError, match="is no file"):
        GpuHost(Path("/tmp"), Path("/nowhere.py"))


def test_a_killed_user_leaves_a_device_that_is_scrubbed_and_free(host: GpuHost) -> None:
    before = len(support.decided(host, "reset"))
    writes = len(support.decided(host, "write"))
    user = support.writing_user(host)
    try:
        until(lambda: len(support.decided(host, "write")) > writes, "the user's copy")
    finally:
        user.kill()
        user.wait()
    until(lambda: len(support.decided(host, "reset")) > before, "the reset")
    assert support.free(host)
    reset = [e for e in support.log(host) if e["kind"] == "effect" and e["request"] == "reset"][-1]
    assert reset["scrubbed"] and reset["left"] == 0 and reset["owner"] == ""


def test_a_killed_broker_leaves_it_owned_until_a_cold_reset(host: GpuHost) -> None:
    with pytest.raises(ConnectionError), host.claim("single") as gpu:
        x = gpu.array(np.ones(1000))
        host.kill("broker")
        gpu.read(x)
    with pytest.raises(HostError, match="is bound until a cold reset"):
        host.start("broker")
    host.cold_reset()
    with host.claim("single") as gpu:
        assert gpu.epoch == 1 and not gpu.read(gpu.empty((1000,), "float64")).any()
