"""Seconds of CPU, so that other work on the host counts little: arms in turn, medians. Each arm moves all of
its bytes once before, since the arm before it has left others in the caches.

The accelerators are those of ShEF whose traffic its sources show (stanford-mast/ShEF, sdaccel and apps):
cycles that they compute, at one iteration a cycle, and bytes that they move.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.harness.measure import in_turn, scratch, seconds_of
from benchmarks.harness.rows import Row, figure
from windtunnel.trust.attest import AllowList, AttestedDevice, Manufacturer, Verifier, measure
from windtunnel.trust.shield import MODES, Engines, Region, Shield, ShieldTraffic, overhead
from windtunnel.trust.shield.model import TAG

SIZES = {64: 1 << 17, 4096: 1 << 21, 65536: 1 << 22}  # bytes that are moved, by chunk
PAPER = "Zhao et al., ShEF, ASPLOS 2022: 0 to 122 % over its accelerators, as others quote it"
ACCELERATORS = {
    "bitcoin": (1.0, ShieldTraffic(64, 0.0), 64),  # registers alone
    "digit recognition": (2000 * 450.0, ShieldTraffic(4096, 642_000 / 4096), 4096),
    "convolution": (64 * 729 * 25.0, ShieldTraffic(4096, 894_336 / 4096, 186_624 / 4096), 4096),
    # four loads and a store a pixel; a buffer that reads and writes each chunk of the image once
    "affine": (512 * 512 * 5.0, ShieldTraffic(64, 16384.0, 16384.0, random=True), 64),
}


def memory_rows(quick: bool) -> Iterator[Row]:
    """MB/s of chunks written and read one by one, in each mode and by AES-GCM alone, which keeps nothing.
    With a copy into memory it is the limit of a shield, which must not seal in memory that is another's."""
    cipher, nonce = AESGCM(os.urandom(32)), bytes(12)
    for chunk, size in SIZES.items():
        data = memoryview(os.urandom(size))
        parts = {at: data[at : at + chunk] for at in range(0, size, chunk)}
        sealed = {at: cipher.encrypt(nonce, part, None) for at, part in parts.items()}
        copied = partial(_copied, cipher, bytearray(chunk + TAG), memoryview(bytearray(2 * size)))
        arms: dict[str, Callable[[], float]] = {
            "written, AES-GCM": partial(_took, lambda _, part: cipher.encrypt(nonce, part, None), parts),
            "written, AES-GCM and a copy": partial(_took, copied, parts),
            "read, AES-GCM": partial(_took, lambda _, part: cipher.decrypt(nonce, part, None), sealed),
        }
        with scratch() as folder:
            for mode in MODES:
                region = Region(0, size, chunk, mode)
                shield = Shield(bytearray(region.room), [region], folder / mode)
                arms[f"written, {mode}"] = partial(_took, shield.write, parts)
                arms[f"read, {mode}"] = partial(_took, shield.read, dict.fromkeys(parts, chunk))
            samples = in_turn(arms, 5 if quick else 25)
        for name, each in samples.items():
            share = median(samples[f"{name.partition(',')[0]}, AES-GCM"]) / median(each)
            gated = chunk == 65536 and name.endswith("versions")
            goal, enough = (">= 60 % of AES-GCM", share >= 0.6) if gated else ("", None)
            rates, note = [size / 1e6 / seconds for seconds in each], f"{share:.0%} of AES-GCM alone"
            yield figure(f"{chunk} B {name}", "MB/s", rates, goal, passed=enough, note=note)


def _copied(cipher: AESGCM, sealed: bytearray, memory: memoryview, at: int, part: memoryview) -> None:
    cipher.encrypt_into(bytes(12), part, None, sealed)
    memory[at : at + len(sealed)] = sealed


def _took(move: Callable[[int, Any], object], chunks: dict[int, Any]) -> float:
    def moved() -> None:
        for at, argument in chunks.items():
            move(at, argument)

    moved()
    return seconds_of(moved, time.process_time)


def handshake_rows(quick: bool) -> Iterator[Row]:
    """M1 to M4, both sides in one thread."""
    maker = Manufacturer()
    verifier = Verifier(AllowList((maker.root,), {"kernel": (measure(b"kernel"),)}), {"key": bytes(32)})
    device = AttestedDevice.boot(maker.fuse(), {"kernel": b"kernel"})

    def exchange(*_: int) -> None:
        verifier.finish(device.accept(verifier.check(device.answer(verifier.hello()))))

    yield figure(
        "both sides", "s", (_took(exchange, {0: 0}) for _ in range(100 if quick else 1000)), "<= 2 ms"
    )


def accelerators_rows(quick: bool) -> Iterator[Row]:
    """How much longer each takes by the twin, with engines as the public sources are set, and with HMAC."""
    most = 0.0
    for name, (compute, traffic, chunk) in ACCELERATORS.items():
        region = Region(0, 1 << 20, chunk)
        pmac, hmac = (100 * overhead(compute, traffic, region, Engines(mac=mac)) for mac in ("pmac", "hmac"))
        yield figure(name, "%", emulated=pmac, note=f"with HMAC {hmac:.0f} % (emulated)")
        most = max(most, pmac)
    yield figure("most of them", "%", emulated=most, published=122.0, source=PAPER)
