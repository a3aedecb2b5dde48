"""The kernel's programs of `network.hostrate`: where they lie, what their maps hold, and how they are driven.

They are rebuilt with clang by ``python -m windtunnel.network.hostrate.live.native``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.linux import bpf, libbpf
from windtunnel.linux.cgroup import mounts, numbered
from windtunnel.network.hostrate.policy import WindowShare
from windtunnel.network.hostrate.spec import HostrateSpec

Array = NDArray[Any]
OBJECT = bpf.Object(
    Path(__file__).parent / "bpf" / "window.bpf.c", "windtunnel.network.hostrate.live.native", typed=True
)
ALLOWED = np.dtype([(name, "<u4") for name in ("floor", "extra", "turn", "flows", "pace", "pad")])
COUNTS = np.dtype([(name, "<u8") for name in ("acked", "seen", "numbers")])
COMMON = np.dtype([("until", "<u8"), ("round", "<u4"), ("by", "<u4"), ("name", "S16")])
BY = {"source": 0, "cgroup": 1}
NAME = b"wt_hostrate\0\0\0\0\0"
UNPACED = 2**32 - 1


class Senders:
    """CUBIC of this kernel, under caps: a congestion control of its own, `name`, that new connections of the
    entities use. All of it goes with this process; a cap that is not given again ends before that.

    Raises:
        UserError: a cgroup that is not there.
        LinuxError: the kernel lacks something; nothing is left.
    """

    def __init__(self, spec: HostrateSpec) -> None:
        self._spec = spec
        self.name = f"wt_hr_{os.getpid()}"
        size, keys = len(spec.entities) + 1, len(list(spec.matches()))
        elf = OBJECT.locate().read_bytes().replace(NAME, self.name.encode().ljust(16, b"\0"))
        top = mounts().unified
        places = {name: place for place, name in enumerate(spec.entities, 1)}
        kind, folders = "prefixes", [top]
        matched = list(spec.matches())
        if spec.by == "cgroup":
            kind, folders = "cgroups", [Path(match) for _, match in matched]
            prefixes = [
                (numbered(folder, f"entities.{name}.match")[0].to_bytes(8, "little"), name)
                for folder, (name, _) in zip(folders, matched, strict=True)
            ]
        else:
            prefixes = [(bpf.prefix_key(match), name) for name, match in matched]
        self._loaded = libbpf.LoadedObject(elf, {"allowed": size, "counts": size, kind: keys})
        try:
            for key, name in prefixes:
                self._loaded.maps[kind][key] = places[name].to_bytes(4, "little")
            self._common(0, 1)
            self._loaded.register("control")
            for folder in folders:
                self._loaded.on_cgroup("choose", folder)
        except BaseException:
            self.close()
            raise

    def counts(self) -> tuple[Array, Array]:
        """Of every entity the packets that were acknowledged, and the flows that were seen in rounds."""
        rows = np.frombuffer(self._loaded.maps["counts"].all(), COUNTS)[1:]
        return rows["acked"].astype(np.int64), rows["seen"].astype(np.int64)

    def give(self, shares: tuple[WindowShare, ...], round_: int, holds: float) -> list[list[int]]:
        """Let these shares hold for so many seconds; of each entity what `ALLOWED` names, as the kernel has
        it."""
        rows = np.zeros(len(shares) + 1, ALLOWED)
        # what the line carries of a packet beside what TCP counts: headers, and Ethernet's
        payload = (self._spec.packet - 52) / (self._spec.packet + 14)
        for place, share in enumerate(shares, 1):
            if not share.free:
                pace = UNPACED if share.pace is None else min(int(share.pace * payload), UNPACED - 1)
                rows[place] = (*share.each, share.turn, share.flows, pace, 0)
        self._loaded.maps["allowed"].put(np.arange(len(rows), dtype="<u4").tobytes(), rows.tobytes())
        self._common(time.monotonic_ns() + int(1e9 * holds), round_)
        return [list(map(int, row)) for row in np.frombuffer(self._loaded.maps["allowed"].all(), ALLOWED)[1:]]

    def _common(self, until: int, round_: int) -> None:
        row = np.array([(until, round_, BY[self._spec.by], self.name.encode())], COMMON)
        self._loaded.maps["common"][bytes(4)] = row.tobytes()

    def close(self) -> None:
        """Let go: sockets that live use plain CUBIC through it, new ones are not theirs any more."""
        if "common" in self._loaded.maps:
            self._common(0, 0)
        self._loaded.close()


if __name__ == "__main__":
    OBJECT.rebuild()
