"""Two networks that nothing but a relay joins: a TUN device in each, and programs inside.

Networks are held by descriptors of this process and by the programs in them, devices by descriptors too, and
programs end with the thread that started them. So the kernel takes all of it back when this process ends,
however it does; no file, name or address of this machine is used.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.linux import LinuxError, namespaces, network
from windtunnel.linux.system import tied_command

TUN = Path("/dev/net/tun")
DEVICE = "wt0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the sending side, and of the other one."""
_SET_INTERFACE, _PLAIN_TUN = 0x400454CA, 0x0001 | 0x1000  # packets of IP, without a header of TUN's own


@dataclass(frozen=True)
class Side:
    """One of the two: descriptors of its network and of its device."""

    network: int
    device: int
    address: str

    def start(self, words: Sequence[str], **pipes: Any) -> subprocess.Popen[str]:
        """A program inside, which ends with the calling thread. Raises OSError."""
        return subprocess.Popen(tied_command(words, self.network), text=True, **pipes)


def missing() -> str | None:
    """Why this host cannot have such links, in words; None if it can."""
    if (reason := network.missing()) is not None:
        return reason
    try:
        os.close(os.open(TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{TUN} cannot be opened: {error.strerror}"
    return None


@contextmanager
def sides() -> Iterator[tuple[Side, Side]]:
    """The sending side and the other one.

    Raises:
        UserError: this machine cannot have them.
        LinuxError: the kernel refused a network or a device.
    """
    if (reason := missing()) is not None:
        raise UserError(f"network mobilerate link: {reason}; accepted without it is network mobilerate run")
    with ExitStack() as stack:
        both = []
        for address in ADDRESSES:
            try:
                space = namespaces.apart(["net"], _own_network)
                stack.callback(os.close, space)
                device = namespaces.within(space, _open_device)
            except OSError as error:
                raise LinuxError(
                    f"a network with a TUN device: {error.strerror}", error.errno or 0
                ) from error
            stack.callback(os.close, device)
            namespace = Path(f"/proc/self/fd/{space}")
            network.configure("lo", "127.0.0.1", 8, namespace)
            network.configure(DEVICE, address, 24, namespace)
            both.append(Side(space, device, address))
        yield both[0], both[1]


def _own_network() -> int:
    return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _open_device() -> int:
    device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", DEVICE.encode(), _PLAIN_TUN))
    except OSError:
        os.close(device)
        raise
    return device
