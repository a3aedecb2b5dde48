"""Ways round the bound of a sandbox's disk, tried from inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from windtunnel.agents.sandbox.files.btrfs_pool import FRESHENED
from windtunnel.agents.sandbox.model import SandboxLimits

pytestmark = pytest.mark.root

LIMIT = 32 << 20
FILL = "dd if=/dev/zero of=/workspace/$RANDOM bs=64k; dd if=/dev/zero of=/workspace/tail bs=512"
EMPTY_FILES = "python3 -c \"[open(f'/workspace/{n}', 'x').close() for n in range(10**6)]\""
OWN_SUBVOLUME = """python3 - <<'END'
import fcntl, os, struct
def attempt(name, request, argument):
    where = os.open("/workspace", os.O_RDONLY)
    try:
        fcntl.ioctl(where, request, bytearray(argument))
        print(name, "done")
    except OSError as error:
        print(name, os.strerror(error.errno))
    os.close(where)
attempt("create", 0x5000940e, struct.pack("=q4088s", 0, b"own"))
attempt("snapshot", 0x50009417, struct.pack("=qQQ32s4040s", os.open("/", os.O_RDONLY), 0, 0, b"", b"own"))
attempt("quotas off", 0xc0109428, struct.pack("=QQ", 2, 0))
with open("/workspace/from", "w+b") as source, open("/workspace/to", "w+b") as target:
    source.write(bytes(8192)); source.flush()
    fcntl.ioctl(target, 0x40049409, source.fileno())
    print("clone of a file", os.fstat(target.fileno()).st_size)
os.remove("/workspace/from"); os.remove("/workspace/to")
END"""
REFUSED = """create Operation not permitted
snapshot Operation not permitted
quotas off Operation not permitted
clone of a file 8192
"""


def test_no_way_to_write_takes_more_than_the_limit(host: Any, make: Callable[..., Any]) -> None:
    """Seen from the host: the blocks of the files, and for files without bytes what the pool has grown by."""
    pool = host.context.pool

    def used(box: Any) -> int:
        box.run(FILL)
        files = (pool.mount(box.name) / "workspace").rglob("*")
        return sum(path.lstat().st_blocks * 512 for path in files)

    box = make(limits=SandboxLimits(disk=LIMIT))
    highest = [used(box)]
    full = box.checkpoint(full=True)
    for _ in range(5):
        box.restore(full.id)
        highest.append(used(box))
        full = box.checkpoint(full=True)
    highest += map(used, host.fork(full.id, 4))
    box.run("rm /workspace/*")
    box.restore(box.checkpoint(full=True).id)
    highest.append(used(box))
    # the last fork is the seventh root over the first one, and each of a full sandbox has a little room
    assert LIMIT / 2 < max(highest) <= 1.01 * LIMIT + 7 * FRESHENED
    small = make(limits=SandboxLimits(disk=LIMIT // 4))
    pool.flush(small.name)
    before = pool.usage()[0]
    small.run(EMPTY_FILES)
    pool.flush(small.name)
    assert pool.usage()[0] - before <= 1.01 * LIMIT / 4


def test_subvolumes_are_refused_before_and_after_a_restore(make: Callable[..., Any]) -> None:
    box = make()
    assert box.run(OWN_SUBVOLUME).text == REFUSED
    box.restore(box.checkpoint(full=True).id)
    assert box.run(OWN_SUBVOLUME).text == REFUSED
    assert box.run("ls -A /workspace").text == ""
