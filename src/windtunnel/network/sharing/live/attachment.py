"""Shares on an interface of this host: put there, read, changed and taken away.

All that there is of them lies in the kernel: a filter on the interface's clsact, the program that it holds,
and the program's maps. Nothing has to run, nothing is kept in files; whoever may ask the kernel finds them by
the filter's name, which ends in the program's number. Filters of others stay where they are, and so does a
clsact that was there before, or that has filters of others by the end.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.linux import LinuxError, bpf, network, queues
from windtunnel.linux.cgroup import numbered
from windtunnel.linux.system import locked
from windtunnel.network.sharing.live import native
from windtunnel.network.sharing.policy import promised
from windtunnel.network.sharing.policy.units import NEVER, rate_of, rate_units
from windtunnel.network.sharing.spec import SharingSpec, limit_of, mark_of, normal

T = TypeVar("T")
NAME = "windtunnel-sharing"
TURN = Path("/run/windtunnel-sharing")
"""Who changes shares locks it: what was read is not written back over what another one set."""


@dataclass
class Attachment:
    """Shares that stand on ``device`` (whose number is ``index``): its maps are held until `close`."""

    device: str
    index: int
    hook: queues.Hook
    by: native.By
    maps: dict[str, bpf.Map]

    def close(self) -> None:
        native.close(self.maps)


@dataclass(frozen=True)
class TenantStatus:
    """An entity as it stands. Rates are bytes/s (``rate`` None: not held back), the rest is bytes since it
    was attached; ``gap``: how far it is ahead of its rate."""

    name: str
    rate: float | None
    lent: float | None
    limit: int
    mark_at: int | None
    gap: int
    passed: int
    dropped: int
    marked: int


def attach(device: str, spec: SharingSpec) -> Attachment:
    """Put ``spec`` on an interface.

    Raises:
        UserError: there is no such interface, or it has shares already; a cgroup that is not there.
        LinuxError: the kernel lacks something, or a queue of others is in the way; nothing was changed.
    """
    index = index_of(device)
    if any(filter_.hook == spec.hook for filter_, _ in _ours(device)):
        raise UserError(f"{device} has shares at {spec.hook} already; accepted is set, or clear before")
    keys, levels = _keys(spec)
    maps = _tried(
        f"the maps for {device}", lambda: native.make_maps(spec.by, len(spec.entities) + 1, len(keys))
    )
    created = False
    try:
        keyed = native.keys_of(maps)
        for key, place in keys:
            keyed[key] = place.to_bytes(4, "little")
        common = np.zeros(1, native.COMMON)
        common["levels"], common["line"] = levels, round(spec.line)
        _fill(maps, spec)
        program = _tried(f"the program for {device}", lambda: native.load(spec.by, maps))
        try:
            bpf.bind(program, maps["names"])
            created = queues.make_clsact(device)
            common["made"] = created
            native.put(maps["common"], common)
            name = f"{NAME}:{spec.by}:{bpf.number_of(program)}"
            _tried(device, lambda: queues.attach(device, spec.hook, program, name))
        finally:
            os.close(program)
    except BaseException:
        native.close(maps)
        if created:
            queues.remove_clsact(device)
        raise
    return Attachment(device, index, spec.hook, spec.by, maps)


def opened(device: str) -> list[Attachment]:
    """The shares that stand on an interface, at most one for each hook.

    Raises:
        UserError: there are none, or no such interface.
    """
    index = index_of(device)
    attachments = [
        Attachment(device, index, filter_.hook, by, _tried(device, lambda number=number: bpf.maps_of(number)))  # type: ignore[misc]
        for filter_, (by, number) in _ours(device)
    ]
    if not attachments:
        raise UserError(f"{device} has no shares; accepted is an interface with some: network sharing attach")
    return attachments


def set_spec(device: str, spec: SharingSpec) -> Attachment:
    """Give the entities that are attached other rates, limits and marks; none of their packets is lost by it.

    Raises:
        UserError: there is nothing attached, or other entities or matches: those would take another program.
    """
    standing = opened(device)
    attached = next((candidate for candidate in standing if candidate.hook == spec.hook), None)
    for attachment in standing:
        if attachment is not attached:
            attachment.close()
    if attached is None:
        raise UserError(f"{device} has shares at {standing[0].hook}; hook is {spec.hook!r}, accepted is that")
    try:
        names = [row["name"].decode() for row in native.read(attached.maps, "names")[1:]]
        if names != list(spec.entities):
            odd = next((name for name in spec.entities if name not in names), None)
            what = f"entity {odd} is unknown" if odd else "an entity is missing, or the order is another"
            raise UserError(
                f"{device}: {what}; accepted are {', '.join(names[:20])} in this order, or clear and attach"
            )
        keys, _ = _keys(spec)
        if attached.by != spec.by or any(_place(attached, key) != place for key, place in keys):
            raise UserError(
                f"{device}: what belongs to whom is another; accepted is the same, or clear and attach"
            )
        with locked(TURN):
            common = native.read(attached.maps, "common")
            common["line"], common["until"] = round(spec.line), 0
            common["change"] += 1
            _fill(attached.maps, spec)
            native.put(attached.maps["common"], common)  # last: who saw this change has read all of it
    except BaseException:
        attached.close()
        raise
    return attached


def shown(attachment: Attachment) -> list[TenantStatus]:
    """Every entity of an attachment, first the others."""
    allowed, states, names = (native.read(attachment.maps, name) for name in ("allowed", "states", "names"))
    until = int(native.read(attachment.maps, "common")["until"][0])
    lends = time.monotonic_ns() < until
    rows = []
    for may, state, row in zip(allowed, states, names, strict=True):
        free = not may["rate"]
        rows.append(
            TenantStatus(
                row["name"].decode(), None if free else rate_of(int(may["rate"])),
                rate_of(int(may["lent"])) if lends and not free else None, int(may["limit"]),
                None if may["mark"] == NEVER else int(may["mark"]), int(state["gap"]) >> 20,
                int(state["passed"]), int(state["dropped"]), int(state["marked"]),
            )
        )  # fmt: skip
    return rows


def clear(device: str) -> list[queues.Hook]:
    """Take all shares from an interface, and its clsact if that was made for them and nobody else uses it:
    the hooks at which there were some. Whoever lends there ends.

    Raises:
        UserError: there is no such interface.
        LinuxError: the kernel refused.
    """
    index_of(device)
    hooks, created = [], False
    with locked(TURN):
        for filter_, (_, number) in _ours(device):
            maps = _tried(device, lambda number=number: bpf.maps_of(number))  # type: ignore[misc]
            try:
                common = native.read(maps, "common")
                created = created or bool(common["made"][0])
                common["change"], common["until"] = native.CLEARED, 0
                native.put(maps["common"], common)
            finally:
                native.close(maps)
            queues.detach(device, filter_)
            hooks.append(filter_.hook)
        if created and not queues.filters(device):
            queues.remove_clsact(device)
    return hooks


def index_of(device: str) -> int:
    """Raises UserError: this process may not look, or there is no interface of that name."""
    reason = network.missing()
    if reason is not None:
        raise UserError(f"network sharing: {reason.replace('network namespaces', 'shares')}")
    try:
        return socket.if_nametoindex(device)
    except OSError:
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        raise UserError(f"there is no interface {device!r}, accepted are {interfaces}") from None


def _ours(device: str) -> list[tuple[queues.Filter, tuple[native.By, int]]]:
    ours = []
    for filter_ in queues.filters(device):
        name, _, rest = filter_.name.partition(":")
        by, _, number = rest.partition(":")
        if filter_.kind == "bpf" and name == NAME and number.isdigit():
            ours.append((filter_, (by, int(number))))
    return ours  # type: ignore[return-value]


def _fill(maps: dict[str, bpf.Map], spec: SharingSpec) -> None:
    """Rates, limits and names."""
    rates = iter(promised(spec.observation()))
    allowed = np.zeros(len(spec.entities) + 1, native.ALLOWED)
    names = np.zeros(len(allowed), native.NAMES)
    for place, (name, part) in enumerate(spec.parts()):
        names[place] = (name.encode(), 0.0, np.nan)
        if part is None:
            continue
        rate = next(rates)
        mark = mark_of(part, rate)
        weight, own = 1.0 if part.weight is None else part.weight, np.nan if part.rate is None else part.rate
        names[place] = (name.encode(), weight, own)
        units = rate_units(rate)
        allowed[place] = (units, units, int(limit_of(part, rate)), NEVER if mark is None else int(mark))
    native.put(maps["names"], names)
    native.put(maps["allowed"], allowed)


def _keys(spec: SharingSpec) -> tuple[list[tuple[bytes, int]], int]:
    """Of everything that is matched its key and its entity's place, and the levels of the cgroups, a bit
    each."""
    places = {name: place for place, (name, _) in enumerate(spec.parts())}
    keys, levels = [], 0
    for name, match in spec.matches():
        text, place = normal(spec.by, match), places[name]
        if spec.by == "mark":
            keys.append((int(text).to_bytes(4, "little"), place))
        elif spec.by == "cgroup":
            identity, level = numbered(Path(text), f"entities.{name}.match")
            if level >= native.LEVELS:
                raise UserError(f"entities.{name}.match is {text!r}, accepted are cgroups 1 to 7 deep")
            levels |= 1 << level
            keys.append((identity.to_bytes(8, "little"), place))
        else:
            keys.append((bpf.prefix_key(text), place))
    return keys, levels


def _place(attachment: Attachment, key: bytes) -> int | None:
    value = native.keys_of(attachment.maps).get(key)
    return None if value is None else int.from_bytes(value, "little")


def _tried(what: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except LinuxError:
        raise
    except OSError as error:
        raise LinuxError(f"{what}: the kernel refused: {error.strerror}", error.errno) from None
