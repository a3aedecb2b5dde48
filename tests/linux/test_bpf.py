"""BPF maps and programs, and what is said where the kernel has or allows none."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from windtunnel.linux import LinuxError, bpf

RETURN_ZERO = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
EXIT_ALONE = struct.pack("<BBhi", 0x95, 0, 0, 0)  # returns what nobody has set


def test_a_kernel_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: int, attributes: bytes) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(bpf, "bpf", refused)
    with pytest.raises(LinuxError, match="does not let this process load BPF programs: Operation not"):
        bpf.loaded(bpf.BpfProgram("sys_exit", RETURN_ZERO, ()), {})


@pytest.mark.root
def test_maps_keep_what_is_put_in_and_programs_are_verified() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    try:
        table = bpf.Map(bpf.HASH, 4, 8, 16)
        program = bpf.loaded(bpf.BpfProgram("sys_exit", RETURN_ZERO, ()), {})
    except OSError as error:
        pytest.skip(f"BPF cannot be used here: {error}")
    os.close(program)
    try:
        table[b"abcd"], table[b"efgh"] = b"12345678", b"87654321"
        assert (table.get(b"abcd"), table.get(b"none")) == (b"12345678", None)
        assert set(table) == {b"abcd", b"efgh"}
        table.remove(b"abcd")
        table.remove(b"abcd")
        assert list(table) == [b"efgh"]
    finally:
        table.close()
    with pytest.raises(LinuxError, match="refused the program for sys_exit") as refused:
        bpf.loaded(bpf.BpfProgram("sys_exit", EXIT_ALONE, ()), {})
    assert "R0" in str(refused.value)
