"""The broker: a process that alone is bound to a device, and through which users claim it (HIX's GPU
enclave).

It proves itself to each user before it is told anything, and has each user prove himself (`trust.attest`,
both ways); it verified the device and its programs when it was bound. What may be done is not decided here:
each request goes to the device with the name of the user whose session it came by. On the path ``double``
data pass through here and are sealed anew; else they do not.

On each failure:
- a user ends, killed or not: his connection does, and the device is reset, which scrubs what he wrote.
- the device ends: so does this process, and users' connections with it.
- this process ends: the device stays owned, whoever comes, until a cold reset.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError, UserError
from windtunnel.trust.attest import AllowList, AttestedDevice, Verifier
from windtunnel.trust.gpu.live.link import (
    CHUNK,
    TAG,
    Fields,
    GpuLink,
    Party,
    Seal,
    SharedWindow,
    chunks,
    serve,
)

USERS = ("claim", "register", "copy", "run", "scrub", "release")
WAYS = ("user>broker", "broker>user", "broker>device", "device>broker")


class Broker:
    """Bound to the device behind ``link``. ``users``: the allow-list for these; ``folder``: of shared memory.

    Raises:
        Denied: another broker is, or was, bound.
    """

    def __init__(self, link: GpuLink, users: AllowList, folder: Path) -> None:
        self._device, self._users, self._turn = link, users, threading.Lock()
        paths = {peer: str(folder / f"shared-{peer}") for peer in ("user", "device")}
        self._facts = {**link.call("bind", shared=paths), "shared": paths["user"]}
        self._shared = {peer: SharedWindow(path) for peer, path in paths.items()}
        self._plain = memoryview(bytearray(CHUNK))
        self._checks: dict[str, Verifier] = {}
        self._proven: set[str] = set()
        self._owner, self._epoch, self._seals = "", 0, dict[str, Seal]()

    def handle(self, user: str, request: Fields) -> Fields:
        """A request of the user with that session: his own proof first, then what the device is to do."""
        do = request.pop("do")
        try:
            with self._turn:
                return self._handle(user, do, request)
        except ConnectionError:  # the device is gone, and whoever comes is to find that out at once
            os._exit(1)

    def _handle(self, user: str, do: str, request: Fields) -> Fields:
        if do == "challenge":
            self._checks[user] = Verifier(self._users)
            return {"m1": self._checks[user].hello().hex()}
        if do == "prove":
            return {"m3": self._checks[user].check(bytes.fromhex(request["m2"])).hex()}
        if do == "proven":
            self._checks[user].finish(bytes.fromhex(request["m4"]))
            self._proven.add(user)
            return self._facts
        if do == "ended":
            self._checks.pop(user, None)
            self._proven.discard(user)
            if user == self._owner:
                self._device.call("reset", epoch=self._epoch)
                self._owner = ""
            return {}
        if user not in self._proven or do not in USERS:
            raise UserError(f"{do!r} is unknown, or comes before the user has proven what runs there")
        if do == "claim":
            return self._claim(user, request["public"])
        double = do == "copy" and request["path"] == "double" and user == self._owner
        if double and request["into"]:
            self._seal_anew("user", "device", **request)
        answer = self._device.call(do, who=user, **request)
        if double and not request["into"]:
            self._seal_anew("device", "user", **request)
        if do == "release":
            self._owner = ""
        return answer

    def _claim(self, user: str, public: str) -> Fields:
        own = Party()
        answer = self._device.call("claim", who=user, public=public, both=own.times(public))
        key = own.times(answer["third"])
        self._owner, self._epoch = user, answer["epoch"]
        self._seals = {way: Seal(key, way) for way in WAYS}
        return {"epoch": self._epoch, "both": own.times(answer["public"])}

    def _seal_anew(
        self, source: str, target: str, epoch: int, offset: int, length: int, **_: Any
    ) -> None:  # fmt: skip
        """Chunks in the memory shared with ``source`` go into that shared with ``target``."""
        near, far = self._seals[f"{source}>broker"], self._seals[f"broker>{target}"]
        for number, at, count in chunks(offset, length):
            about, plain = f"{epoch}:{at}:{count}", self._plain[:count]
            near.take(self._shared[source].place(number, count + TAG), about, plain)
            far.put(plain, about, self._shared[target].place(number, count + TAG))


def main() -> None:
    """As of the device; it says so and ends where it cannot be bound."""
    spec = pickle.load(sys.stdin.buffer)
    boot = partial(AttestedDevice.boot, spec["fuse"], {"broker": Path(__file__).read_bytes()})
    try:
        broker = Broker(GpuLink(spec["device"], Verifier(spec["devices"])), spec["users"], spec["folder"])
        serve(spec["address"], boot, broker.handle)
    except (HostError, ConnectionError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
