"""Where the fields of kernel structures lie, from the kernel's own type data (BTF).

The program in ``bpf/turn.bpf.c`` reads a handful of fields (a task's descriptors, a dentry's name and parent)
whose offsets differ between kernels. They are looked up by name in ``/sys/kernel/btf/vmlinux``, which
distribution kernels have carried since 2020; fields inside unnamed structs and unions are found too.

Source: Documentation/bpf/btf.rst of the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from windtunnel.agents.sandbox.live.inspect.fault import InspectError

VMLINUX = Path("/sys/kernel/btf/vmlinux")
_STRUCT, _UNION = 4, 5
# words that follow the three of every type, by kind: fixed, and for each of its members
_FIXED = {1: 1, 3: 3, 14: 1, 17: 1}
_EACH = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}


class Types:
    """The structures and unions of one BTF blob. Raises InspectError when it is none."""

    def __init__(self, data: bytes) -> None:
        try:
            magic, version, _, header = struct.unpack_from("<HBBI", data)
            type_at, type_size, string_at, string_size = struct.unpack_from("<IIII", data, 8)
        except struct.error:
            raise InspectError("the kernel's type data (BTF) is cut short") from None
        if magic != 0xEB9F or version != 1:
            raise InspectError(f"the kernel's type data (BTF) has version {version}, not 1")
        self._strings = data[header + string_at : header + string_at + string_size]
        self._words = memoryview(data[header + type_at : header + type_at + type_size]).cast("I")
        self._starts = self._indexed()

    def _indexed(self) -> list[int]:
        words, starts, at = self._words, [0], 0
        fixed, each, end = _FIXED, _EACH, len(words)
        while at < end:
            starts.append(at)
            info = words[at + 1]
            kind = (info >> 24) & 31
            if kind in each:
                at += 3 + each[kind] * (info & 0xFFFF)
            else:
                at += 3 + fixed.get(kind, 0)
        return starts

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _named(self, name: str) -> int:
        """Where the structure of that name starts."""
        wanted = self._strings.find(b"\0" + name.encode() + b"\0") + 1
        words = self._words
        if wanted:
            for start in self._starts[1:]:
                if words[start] == wanted and (words[start + 1] >> 24) & 31 == _STRUCT:
                    return start
        raise InspectError(f"the kernel's type data knows no struct {name}")

    def _members(self, start: int, base: int = 0) -> Iterable[tuple[str, int, int]]:
        """Name, byte offset and type of every field, those of unnamed structs and unions among them."""
        words = self._words
        info = words[start + 1]
        for number in range(info & 0xFFFF):
            name, kind, bits = words[start + 3 + 3 * number : start + 6 + 3 * number]
            offset = base + ((bits & 0xFFFFFF if info >> 31 else bits) >> 3)
            if name:
                yield self._name(name), offset, kind
            elif (words[self._starts[kind] + 1] >> 24) & 31 in (_STRUCT, _UNION):
                yield from self._members(self._starts[kind], offset)

    def offset(self, path: str) -> int:
        """Byte offset of ``struct.field[.field…]``; ``a|b`` names alternatives, the first one present
        counts."""
        name, *fields = path.split(".")
        start, total = self._named(name), 0
        for field in fields:
            members = {member: (offset, kind) for member, offset, kind in self._members(start)}
            for choice in field.split("|"):
                if choice in members:
                    offset, kind = members[choice]
                    break
            else:
                raise InspectError(f"the kernel's type data knows no field {field} in {path}")
            total, start = total + offset, self._starts[self._plain(kind)]
        return total

    def _plain(self, kind: int) -> int:
        """The type behind typedefs and qualifiers."""
        while (self._words[self._starts[kind] + 1] >> 24) & 31 in (8, 9, 10, 11, 18):
            kind = self._words[self._starts[kind] + 2]
        return kind


def load(path: Path = VMLINUX) -> Types:
    """Raises InspectError when the kernel carries no type data."""
    try:
        return Types(path.read_bytes())
    except OSError as error:
        raise InspectError(f"no kernel type data at {path} ({error.strerror})") from None
