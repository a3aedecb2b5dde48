"""Runs inside a sandbox, with the sandbox's own Python: tries each attack in a process of its own, and tells.

Arguments: a file of JSON with ``attacks`` and ``names`` (what the attacks may refer to). Prints one line of
JSON: for each attack and user ``reached``, ``refused`` or ``broken``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

SECRET = HOME = ""
"""Given from outside, with more that only attacks name."""
libc = ctypes.CDLL(None, use_errno=True)
CAPABLE = struct.pack("<5I", 0x02000001, 1 << 21, 0, 0, 0)  # permitted and effective: CAP_SYS_ADMIN
LONGEST = 10.0


def number_of(x86: int, arm: int) -> int:
    return x86 if os.uname().machine == "x86_64" else arm


def _passed(arguments: tuple[Any, ...]) -> list[Any]:
    return [
        ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_long(argument or 0)
        for argument in arguments
    ]


def _done(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(number: int, *arguments: Any) -> int:
    return _done(libc.syscall(ctypes.c_long(number), *_passed(arguments)))


def libcall(name: str, *arguments: Any) -> int:
    return _done(getattr(libc, name)(*_passed(arguments)))


def mount(source: Any, target: Any, kind: Any, flags: int = 0, data: str = "") -> None:
    given = [
        argument.encode() if isinstance(argument, str) else argument for argument in (source, target, kind)
    ]
    libcall("mount", *given, flags, data.encode() if data else 0)


def overwrite(path: str, text: str) -> None:
    os.write(os.open(path, os.O_WRONLY), text.encode())


def rewrite(path: str) -> None:
    """Writes what is there already, so that nothing breaks where it is allowed."""
    overwrite(path, "h" if path.endswith("sysrq-trigger") else Path(path).read_text())


def secret_of(prefix: str) -> str:
    return Path(prefix + SECRET).read_text()


def told_home(path: str) -> str:
    return HOME if HOME in Path(path).read_text() else ""


def first_of(*paths: str) -> str:
    last = OSError()
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY))
            return path
        except OSError as error:
            last = error
    raise last


def connect(family: int, address: Any) -> None:
    plug = socket.socket(family)
    plug.settimeout(2)
    plug.connect(address)


def machine_code(text: str) -> str:
    if os.uname().machine != "x86_64":
        return ""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(text))
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return str(result)


def vm_read(pid: int) -> str:
    held = ctypes.create_string_buffer(16)
    own = (ctypes.c_size_t * 2)(ctypes.addressof(held), 16)
    its = (ctypes.c_size_t * 2)(0x400000, 16)
    return str(_done(libc.process_vm_readv(pid, own, 1, its, 1, 0)))


def mapped_at(path: str) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(int(line.split("-")[0], 16) for line in lines if line.endswith(path))


def raised() -> str:
    header, data = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", *[0xFFFFFFFF] * 6)
    call(number_of(126, 91), header, data)
    return "all"


def copied(program: str, mode: int) -> str:
    to = f"/tmp/program-{os.getpid()}"
    shutil.copy(program, to)
    os.chmod(to, mode)
    return to


def run_as(user: int, program: str) -> str:
    done = subprocess.run([program, "/proc/self/status"], user=user, capture_output=True, text=True)
    return done.stdout or "CapEff: 0 Uid: - -"


def admin(status: str) -> str:
    return "CAP_SYS_ADMIN" if int(status.split("CapEff:")[1].split()[0], 16) >> 21 & 1 else ""


def interface_down() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        fcntl.ioctl(plug, 0x8914, struct.pack("16sh22x", b"lo", 0))
    return "down"


def audited() -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9) as plug:
        plug.settimeout(1)
        text = b"a line that was never so\0"
        plug.send(struct.pack("=IHHII", 16 + len(text), 1005, 5, 1, 0) + text)
        code = struct.unpack_from("=i", plug.recv(4096), 16)[0]
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return "a line"


def uevents() -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as plug:
        plug.bind((0, 1))
        plug.settimeout(0.5)
        try:
            return plug.recv(4096).split(b"\0")[0].decode()
        except TimeoutError:
            return ""


def _ioctl(number: int, argument: Any) -> None:
    folder = os.open("/tmp", os.O_RDONLY)
    fcntl.ioctl(folder, number, argument)


def subvolume() -> str:
    _ioctl(0x5000940E, bytearray(struct.pack("=q4088s", 0, b"own-%d" % os.getpid())))
    return "made"


def nested_snapshot() -> str:
    root = os.open("/", os.O_RDONLY)
    _ioctl(0x50009417, bytearray(struct.pack("=q6Q4040s", root, *[0] * 6, b"again-%d" % os.getpid())))
    return "made"


def tree_search() -> str:
    key = struct.pack("=7Q4I4Q", 1, 0, 2**64 - 1, 0, 2**64 - 1, 0, 2**64 - 1, 0, 255, 9, 0, 0, 0, 0, 0)
    _ioctl(0xD0009411, bytearray(key.ljust(4096, b"\0")))
    return "read"


def relink(path: str, target: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)
    os.symlink(target, path)


def tried(attack: dict[str, Any]) -> dict[str, str]:
    """What became of one attack, in this process."""
    place = dict(globals())
    exec("def attack():\n" + textwrap.indent(attack["code"] or "pass", "    "), place)
    try:
        reached = place["attack"]()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return {"refused" if name in attack["by"] else "broken": name}
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {error}"}
    return {"reached": str(reached)} if reached else {"refused": "nothing was reached"}


def alone(attack: dict[str, Any], user: int) -> dict[str, str]:
    """`tried` in a process of its own, with all that it starts."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(reader)
        if user:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        os.write(writer, json.dumps(tried(attack)).encode())
        os._exit(0)
    os.close(writer)
    reply = b""
    while select.select([reader], [], [], LONGEST)[0]:
        piece = os.read(reader, 65536)
        reply += piece
        if reply or not piece:
            break
    else:
        # what may be killed may also stand still where it is: it reached nothing
        reply = json.dumps(
            {"refused" if attack["killed"] else "broken": "it did not come to its end"}
        ).encode()
    os.close(reader)
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if reply:
        return dict(json.loads(reply))
    ended = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended without a word"
    return {"refused" if attack["killed"] and os.WIFSIGNALED(status) else "broken": ended}


def main() -> None:
    with open(sys.argv[1]) as file:
        given = json.load(file)
    globals().update(given["names"])
    out = []
    for attack in given["attacks"]:
        for user in attack["users"]:
            out.append({"name": attack["name"], "user": user, **alone(attack, user)})
    print(json.dumps(out))


if __name__ == "__main__":
    main()
