"""Programs that need the kernel's types: congestion controls in BPF, by libbpf through ctypes.

`bpf` loads what is the same for every kernel. A program that reads the kernel's own structures, or calls its
functions, is fitted to the kernel that runs: libbpf does that, from the type data of both. What is attached
hangs on links, which are descriptors of this process: when it ends, however it does, they are gone. Sockets
that use a congestion control keep its programs until they close.

Source: libbpf.h, Documentation/bpf/ of the kernel (libbpf, kfuncs), bpf(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from windtunnel.linux import LinuxError, bpf, system

_LINK_CREATE, _LINK_FLAG = 28, 1 << 13
SOCK_OPS, _STRUCT_OPS = 3, 44
"""How links attach (enum bpf_attach_type)."""
_SAID = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_POINTERS = (
    "bpf_object__open_mem", "bpf_object__find_map_by_name", "bpf_object__find_program_by_name",
    "bpf_object__next_map", "bpf_map__attach_struct_ops", "bpf_map__name",
)  # fmt: skip
_COUNTS = {"bpf_map__set_max_entries": ctypes.c_uint32, "bpf_map__set_map_flags": ctypes.c_uint32}


class LoadedObject:
    """The programs and maps of an object file, in the kernel. ``sizes``: entries of maps by name, where they
    are not those of the file. ``maps``: by name, those that are not of congestion controls.

    Raises:
        LinuxError: libbpf is not there, or the kernel refused; with the last words about it.
    """

    def __init__(self, elf: bytes, sizes: Mapping[str, int]) -> None:
        self._library, self._words = _library(), list[str]()
        self._print = _SAID(self._say)
        self._library.libbpf_set_print(self._print)
        self._object = self._library.bpf_object__open_mem(elf, ctypes.c_size_t(len(elf)), None)
        self.maps: dict[str, bpf.Map] = {}
        self._links: list[int] = []
        try:
            if not self._object:
                raise OSError(ctypes.get_errno(), "it cannot be read")
            for name, count in sizes.items():
                self._checked(self._library.bpf_map__set_max_entries(self._map(name), count))
            self._controls = self._prepared()
            self._checked(self._library.bpf_object__load(ctypes.c_void_p(self._object)))
            for name, map_ in self._each():
                if name not in self._controls:
                    self.maps[name] = bpf.Map.of_descriptor(os.dup(self._library.bpf_map__fd(map_)))
        except LinuxError:  # of no such map: no kernel was asked
            self.close()
            raise
        except OSError as error:
            self.close()
            raise self._refused("the program", error) from None

    def register(self, name: str) -> None:
        """Make the congestion control in the map ``name`` one that sockets may use, until `close` or the end
        of this process. Raises LinuxError: there is no such map (ENOENT), one of its name is there already
        (EEXIST), or the kernel refused.
        """
        map_ = self._map(name)
        try:
            link = self._library.bpf_map__attach_struct_ops(map_)
            if not link:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            link_fd = int(self._library.bpf_link__fd(ctypes.c_void_p(link)))
            table = int(self._library.bpf_map__fd(map_))
            if link_fd == table:  # libbpf before 1.2 has given it its values only
                self._links.append(_link(table, 0, _STRUCT_OPS))
        except OSError as error:
            raise self._refused(f"the congestion control {name}", error) from None

    def on_cgroup(self, name: str, folder: Path, kind: int = SOCK_OPS) -> None:
        """Attach a program to a cgroup, beside those of others. Raises LinuxError."""
        number = self.program(name)
        try:
            cgroup = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._links.append(_link(number, cgroup, kind))
            finally:
                os.close(cgroup)
        except OSError as error:
            raise self._refused(f"the program {name} on {folder}", error) from None

    def program(self, name: str) -> int:
        """The descriptor of a program, which is closed with this."""
        program = self._library.bpf_object__find_program_by_name(ctypes.c_void_p(self._object), name.encode())
        return int(self._library.bpf_program__fd(ctypes.c_void_p(program)))

    def close(self) -> None:
        """Detach what is attached, and let go of all."""
        for descriptor in self._links:
            os.close(descriptor)
        self._links.clear()
        for map_ in self.maps.values():
            map_.close()
        self.maps.clear()
        if self._object:
            self._library.bpf_object__close(ctypes.c_void_p(self._object))
            self._object = None

    def _prepared(self) -> list[str]:
        """The maps that are congestion controls (or other tables of functions): they are to be linked."""
        names = []
        for name, map_ in self._each():
            if self._library.bpf_map__type(map_) == bpf.STRUCT_OPS:
                self._checked(self._library.bpf_map__set_map_flags(map_, _LINK_FLAG))
                names.append(name)
        return names

    def _each(self) -> list[tuple[str, ctypes.c_void_p]]:
        maps, last = [], None
        while last := self._library.bpf_object__next_map(
            ctypes.c_void_p(self._object), ctypes.c_void_p(last)
        ):
            name = ctypes.string_at(self._library.bpf_map__name(ctypes.c_void_p(last))).decode()
            maps.append((name, ctypes.c_void_p(last)))
        return maps

    def _map(self, name: str) -> ctypes.c_void_p:
        map_ = self._library.bpf_object__find_map_by_name(ctypes.c_void_p(self._object), name.encode())
        if not map_:
            raise LinuxError(f"the program has no map {name}", errno.ENOENT)
        return ctypes.c_void_p(map_)

    def _checked(self, result: int) -> None:
        if result < 0:
            raise OSError(-result, os.strerror(-result))

    def _say(self, level: int, form: bytes, values: int) -> int:
        if level == 0:
            room = ctypes.create_string_buffer(400)
            system.libc.vsnprintf(room, ctypes.c_size_t(400), form, ctypes.c_void_p(values))
            self._words.append(room.value.decode(errors="replace").strip())
        return 0

    def _refused(self, what: str, error: OSError) -> LinuxError:
        words = " / ".join(line.splitlines()[-1] for line in self._words[-3:] if line)
        return LinuxError(
            f"{what}: the kernel refused: {error.strerror}{f'; {words}' if words else ''}", error.errno
        )


def _link(what: int, where: int, kind: int) -> int:
    return system.bpf(_LINK_CREATE, struct.pack("IIII", what, where, kind, 0))


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise LinuxError("libbpf.so.1 is not installed: apt-get install libbpf1") from None
    for name in _POINTERS:
        getattr(library, name).restype = ctypes.c_void_p
    for name, kind in _COUNTS.items():
        getattr(library, name).argtypes = (ctypes.c_void_p, kind)
    return library
