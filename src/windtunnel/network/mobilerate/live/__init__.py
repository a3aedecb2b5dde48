"""A mobile link between two networks of this machine: who is measured on it, and any program through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from windtunnel.base.errors import HostError, UserError
from windtunnel.network.mobilerate.live import relay, transport
from windtunnel.network.mobilerate.live.place import Side, sides
from windtunnel.network.mobilerate.outcome import MobileResult, MobileWorld, outcome
from windtunnel.network.mobilerate.policy import POLICIES
from windtunnel.traces.bandwidth import BandwidthTrace

LATE = 5e-3
"""Seconds that 95 of 100 packets, and intervals, may be late at the most; a run above that is thrown away."""
TRIES = 3
CONTROLS = ("cubic", "reno", "bbr")
ARMS = (*POLICIES, *CONTROLS)
PATIENCE, USUAL = 20.0, MobileWorld()


@dataclass(frozen=True)
class RelayMeasurement:
    """``result``: None where every try was late. ``late``: of the last try, seconds at the 95th percentile of
    packets and of intervals (0: it has none). ``thrown_away``: tries that were late."""

    result: MobileResult | None
    late: tuple[float, float]
    thrown_away: int


def lacking(arm: str) -> str | None:
    """Why ``arm`` cannot be measured on this host, in words.

    Raises:
        UserError: there is no such arm live.
    """
    if arm not in ARMS:
        raise UserError(f"network mobilerate link: policy {arm!r}; accepted are {', '.join(ARMS)}")
    controls = transport.CONTROLS.read_text(encoding="ascii").split()
    return (
        None if arm in POLICIES or arm in controls else f"the kernel has no {arm}, but {' '.join(controls)}"
    )


def measure(
    trace: BandwidthTrace,
    arm: str,
    seconds: float,
    *,
    world: MobileWorld = USUAL,
    seed: int = 0,
    log: Path | None = None,
) -> RelayMeasurement:
    """One sender for ``seconds``, again while tries are late.

    Raises:
        UserError: this host has no such links, or there is no such arm.
        HostError: a process of it failed, or did not end.
    """
    if why := lacking(arm):
        raise UserError(f"network mobilerate link: {why}")
    late = (0.0, 0.0)
    for tries in range(TRIES):
        result, late = _once(trace, arm, seconds, world, seed, log)
        if max(late) <= LATE:
            return RelayMeasurement(result, late, tries)
    return RelayMeasurement(None, late, TRIES)


def _once(
    trace: BandwidthTrace, arm: str, seconds: float, world: MobileWorld, seed: int, log: Path | None
) -> tuple[MobileResult, tuple[float, float]]:
    kind = "" if arm in POLICIES else "-tcp"
    with linked(trace, seconds, world, seed) as (here, there, between):
        program, pipe = _program(transport.__name__), subprocess.PIPE
        with _ended(there.start([*program, f"receive{kind}"], stdout=pipe)) as receiver:
            _line(receiver)
            words = [*program, f"send{kind}", there.address, arm, str(seconds), *([str(log)] if log else [])]
            with _ended(here.start(words, stdout=pipe)) as sender:
                ticks = json.loads(_output_of(sender, seconds + PATIENCE))
            report = json.loads(_output_of(between, PATIENCE, "end\n"))
    packets, intervals = (
        float(np.quantile(seconds_late, 0.95)) if seconds_late else 0.0
        for seconds_late in (report["late"], ticks)
    )
    possible = len(trace.within(seconds))
    result = outcome(report["waits"], report["passed"], possible, seconds, report["dropped"])
    return result, (packets, intervals)


@contextmanager
def linked(
    trace: BandwidthTrace, seconds: float, world: MobileWorld = USUAL, seed: int = 0
) -> Iterator[tuple[Side, Side, subprocess.Popen[str]]]:
    """Two sides and the relay between them, which lets packets pass for ``seconds`` from the first one.

    Raises as `measure` does."""
    with sides() as (here, there):
        devices = here.device, there.device
        own = {"times": trace.times.tolist(), "period": trace.period, "loss": trace.loss}
        settings = {**own, "ends": seconds, "seed": seed, **asdict(world)}
        with open(os.memfd_create("trace"), "w+b") as file:
            file.write(json.dumps(settings).encode())
            file.flush()
            passes = (*devices, file.fileno())
            words, pipe = [*_program(relay.__name__), *map(str, passes)], subprocess.PIPE
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, pass_fds=passes)
        with _ended(process):
            _line(process)
            yield here, there, process


def through(
    trace: BandwidthTrace,
    program: Sequence[str],
    *,
    server: Sequence[str] = (),
    world: MobileWorld = USUAL,
    seed: int = 0,
) -> int:
    """Run a program on the sending side, and ``server`` on the other one until it ends; its exit status.

    Raises as `measure` does; UserError: there is no such program."""
    with linked(trace, 1e9, world, seed) as (here, there, _):
        try:
            if server:
                with _ended(there.start(server)):
                    return here.start(program).wait()
            return here.start(program).wait()
        except OSError as error:
            raise UserError(f"network mobilerate link: {error.filename}: {error.strerror}") from error


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, killed at the end."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise HostError(f"mobilerate: {_name(process)} ended with status {process.wait()} and was not ready")


def _output_of(process: subprocess.Popen[str], seconds: float, words: str | None = None) -> str:
    """All that it prints until it ends."""
    try:
        report, _ = process.communicate(words, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise HostError(f"mobilerate: {_name(process)} did not end within {seconds:.0f} s") from None
    if process.returncode or not report:
        raise HostError(f"mobilerate: {_name(process)} failed with status {process.returncode}")
    return report


def _program(module: str) -> list[str]:
    return [sys.executable, "-c", f"from {module} import main; main()"]


def _name(process: subprocess.Popen[str]) -> str:
    return " ".join(map(str, process.args))  # type: ignore[arg-type]
