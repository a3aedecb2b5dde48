"""Checkpoints that nobody made: whole, with checksums that fit, of steps to come; turned bits; and a peer."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path

from support.slots import read_header
from windtunnel.base import handshake
from windtunnel.base.keys import Keys
from windtunnel.training.checkpoint.live import slot, storage
from windtunnel.training.checkpoint.live.memory import messages


def forge_stored(url: str, ahead: int) -> bool:
    """The newest checkpoint in storage once more, as of ``ahead`` steps later. False: there is none."""
    real = [checkpoint for checkpoint in storage.steps(url) if not checkpoint.bad]
    if not real:
        return False
    newest = max(real, key=lambda checkpoint: checkpoint.step)
    written, layouts = [], {}
    for shard in newest.shards:
        data = memoryview(bytearray(shard.nbytes))
        storage.read_shard(url, shard, data)
        written.append(storage.write_shard(url, replace(shard, step=shard.step + ahead), data))
        layouts[shard.layout] = storage.layout(url, shard)
    storage.complete_step(url, written, layouts)
    return True


def forge_memory(folder: Path, ahead: int) -> None:
    """The same of every complete slot below ``folder``."""
    for path in folder.rglob("*.slot"):
        header = read_header(path)
        if header is not None and header.complete:
            file = slot.SlotFile.open(path)
            file.begin(replace(header.shard, step=header.shard.step + ahead))
            file.complete(slot.checksum_of(file.data))
            file.close()


def flip_memory(folder: Path) -> None:
    """A bit in the middle of the data of every slot below ``folder``."""
    for path in folder.rglob("*.slot"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.seek(slot.HEADER + (path.stat().st_size - slot.HEADER) // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def asked(address: str, through: str, secret: Keys, timeout: float) -> socket.socket:
    """A peer's connection to the memory service at ``address``, by way of ``through``; it asked something.

    Raises:
        OSError: it does not within ``timeout`` seconds.
    """
    sock = handshake.connect(through, timeout, secret, messages.service(address))
    try:
        messages.ask(sock, {"op": "list"})
    except BaseException:
        sock.close()
        raise
    return sock
