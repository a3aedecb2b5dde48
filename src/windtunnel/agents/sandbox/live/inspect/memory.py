"""Which pages a process wrote since a moment, exactly, from outside.

A userfaultfd in asynchronous write-protect mode makes the kernel keep one mark for every page that was
written; PAGEMAP_SCAN reads the marks and, while the process is frozen, resets them. Mappings that came later
are not under it and are told as new. Where the kernel keeps soft-dirty marks for itself this module is still
what is used: it needs no build option, and it does not disturb CRIU, which uses those marks.

The process opens the userfaultfd itself and hands it over without noticing (`userfaultfd_of`): one thread is
stopped by ptrace, made to execute ``userfaultfd`` and ``close`` at the system call instruction of its vDSO,
and put back exactly as it was. A thread stopped inside a blocking call has the kernel's restart mark in its
registers; because they are put back whole, the kernel restarts the call when the thread goes on. Signals
other than the trap of the single step are held back meanwhile. The sandbox's seccomp filter is suspended for
the stopped thread only (PTRACE_O_SUSPEND_SECCOMP). The kernel lets the thread go on when the tracer dies;
only within the few microseconds of the two steps would it go on at the wrong place.

Source: Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst of the kernel (6.7 and later); ptrace(2),
with the order of steps of CRIU's parasite and gdb's inferior calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import signal
import struct
import time
from collections.abc import Iterator

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.linux import processes
from windtunnel.linux.system import checked, copied_descriptor, libc

_SEIZE, _INTERRUPT, _DETACH, _GETREGS, _SETREGS, _STEP, _CONT = 0x4206, 0x4207, 17, 12, 13, 9, 7
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_SUSPEND_SECCOMP = 1 << 21
_EVENT_STOP = 128
_WALL = 0x40000000
_USERFAULTFD, _CLOSE = 323, 3
_REGISTERS = struct.Struct("<27Q")
_RDX, _RSI, _RDI, _RAX, _ORIG_RAX, _RIP, _CS, _R10, _R8, _R9 = 12, 13, 14, 10, 15, 16, 17, 7, 9, 8
_USER_CODE = 0x33
_STEP_SECONDS = 10.0
"""Between the steps there is no way back, so they are waited for, however busy the machine is."""
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    checked(libc.ptrace(request, thread, address, data), "ptrace")


class _Stopped:
    """A thread of another process, seized; ``close`` lets it go on."""

    def __init__(self, thread: int, deadline: float) -> None:
        self._thread, self._deadline = thread, deadline
        _ptrace(_SEIZE, thread, 0, _SUSPEND_SECCOMP)
        self._halted = False
        self._signal = 0
        try:
            _ptrace(_INTERRUPT, thread)
            while True:
                event, number = self._wait()
                if event == _EVENT_STOP and number == signal.SIGTRAP:
                    break
                if event == _EVENT_STOP:
                    raise InspectError("it is stopped by a signal")
                # a signal was on its way before the interrupt: deliver it, the interrupt comes next
                _ptrace(_CONT, thread, 0, number)
                self._halted = False
        except BaseException:
            self.close()
            raise

    def _wait(self) -> tuple[int, int]:
        """The event and the signal of the next stop."""
        pause = 2e-5
        while True:
            found = os.waitid(os.P_PID, self._thread, os.WSTOPPED | os.WNOHANG | _WALL)
            if found is not None:
                self._halted = True
                return found.si_status >> 8, found.si_status & 0x7F
            if time.monotonic() > self._deadline:
                raise InspectError("it did not stop in time")
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)

    def registers(self) -> list[int]:
        buffer = ctypes.create_string_buffer(_REGISTERS.size)
        _ptrace(_GETREGS, self._thread, 0, ctypes.addressof(buffer))
        return list(_REGISTERS.unpack(buffer.raw))

    def set_registers(self, values: list[int]) -> None:
        buffer = ctypes.create_string_buffer(_REGISTERS.pack(*values), _REGISTERS.size)
        _ptrace(_SETREGS, self._thread, 0, ctypes.addressof(buffer))

    def mask(self) -> int:
        value = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, self._thread, 8, ctypes.addressof(value))
        return value.value

    def set_mask(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        _ptrace(_SETSIGMASK, self._thread, 8, ctypes.addressof(value))

    def step(self) -> None:
        """Execute one instruction."""
        self._deadline = time.monotonic() + _STEP_SECONDS
        _ptrace(_STEP, self._thread)
        self._halted = False
        event, number = self._wait()
        if event or number != signal.SIGTRAP:
            # only signals that cannot be held back come here: pass them on at the end
            self._signal = 0 if event else number
            raise InspectError("a signal came in between")

    def close(self) -> None:
        if not self._halted:
            try:
                # waits for the stop that was asked for, so that it can be taken back
                self._deadline = time.monotonic() + 0.05
                self._wait()
            except (OSError, InspectError):
                return
        try:
            _ptrace(_DETACH, self._thread, 0, self._signal)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise


def _system_call_instruction(pid: int) -> int:
    """The address of a ``syscall`` instruction in the vDSO of a process."""
    for each in processes.mappings(pid):
        if each.path == "[vdso]":
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(each.start)
                at = memory.read(each.end - each.start).find(b"\x0f\x05")
            if at >= 0:
                return each.start + at
    raise InspectError("it has no vDSO")


def userfaultfd_of(pid: int, seconds: float = 0.2) -> int:
    """A descriptor, in this process, of a userfaultfd on the memory of ``pid``.

    Must be called from a thread that ends soon after: should the stop not come in time, the end of the
    tracing thread is what frees the other one. Raises InspectError or OSError; the process is unharmed.
    """
    instruction = _system_call_instruction(pid)
    threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: thread != pid)
    pidfd = os.pidfd_open(pid)
    try:
        stopped = _Stopped(_running(pid, threads), time.monotonic() + seconds)
        try:
            return _handed_over(stopped, instruction, pidfd)
        finally:
            stopped.close()
    finally:
        os.close(pidfd)


def _running(pid: int, threads: list[int]) -> int:
    """A thread that has not ended: the main one may be gone before the others."""
    for thread in threads:
        if next(iter(processes.stat(pid, str(thread))), "X") not in "ZX":
            return thread
    raise InspectError("it ended")


def _handed_over(stopped: _Stopped, instruction: int, pidfd: int) -> int:
    registers, mask = stopped.registers(), stopped.mask()
    if registers[_CS] != _USER_CODE:
        raise InspectError("it is a 32-bit program")

    def call(number: int, argument: int) -> int:
        values = list(registers)
        values[_RIP], values[_RAX], values[_RDI] = instruction, number, argument
        values[_RSI] = values[_RDX] = values[_R10] = values[_R8] = values[_R9] = 0
        values[_ORIG_RAX] = 2**64 - 1  # no call to restart
        stopped.set_registers(values)
        stopped.step()
        result = stopped.registers()[_RAX]
        return result - 2**64 if result >> 63 else result

    stopped.set_mask(2**64 - 1 & ~(1 << (signal.SIGTRAP - 1)))
    try:
        theirs = call(_USERFAULTFD, os.O_CLOEXEC)
        if theirs < 0:
            raise OSError(-theirs, os.strerror(-theirs))
        try:
            return copied_descriptor(pidfd, theirs)
        finally:
            call(_CLOSE, theirs)
    finally:
        stopped.set_registers(registers)
        stopped.set_mask(mask)


_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_SCAN = 0xC0606610
_WP_ASYNC, _WP_UNPOPULATED = 1 << 15, 1 << 13
_MODE_WP = 2
_PROTECT = 1
_ALLOWED, _WRITTEN = 1 << 0, 1 << 1
_TOP = 0x7FFFFFFFF000
_PAGE = 4096
_REGIONS = 512


def missing() -> str:
    """Why memory cannot be tracked here, in words; empty when a write to one of two pages was found."""
    if platform.machine() != "x86_64":
        return f"memory tracking is not made for machines of the kind {platform.machine()}"
    if os.geteuid() != 0:
        return "needs root"
    fd = libc.syscall(_USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        return f"userfaultfd: {os.strerror(ctypes.get_errno())}"
    pages = mmap.mmap(-1, 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    try:
        _enable(fd)
        _protect(fd, start, start + 2 * _PAGE)
        with open("/proc/self/pagemap", "rb") as pagemap:
            _scan(pagemap.fileno(), start, start + 2 * _PAGE, _PROTECT, 0, _ALLOWED | _WRITTEN)
            pages[_PAGE] = 1
            found = _scan(pagemap.fileno(), start, start + 2 * _PAGE, 0, 0, _ALLOWED | _WRITTEN)
    except OSError as error:
        return f"userfaultfd has no asynchronous write protection (Linux 6.7): {error.strerror}"
    finally:
        os.close(fd)
    return "" if found == 1 else "a write was not found by PAGEMAP_SCAN"


def _enable(fd: int) -> None:
    fcntl.ioctl(fd, _API, bytearray(struct.pack("<QQQ", 0xAA, _WP_ASYNC | _WP_UNPOPULATED, 0)))


def _protect(fd: int, start: int, end: int) -> None:
    fcntl.ioctl(fd, _REGISTER, bytearray(struct.pack("<QQQQ", start, end - start, _MODE_WP, 0)))


def _scan(pagemap: int, at: int, end: int, flags: int, inverted: int, mask: int) -> int:
    """Pages in which all categories of ``mask`` hold, those of ``inverted`` turned round."""
    regions = ctypes.create_string_buffer(24 * _REGIONS)
    where = ctypes.addressof(regions)
    pages = 0
    while at < end:
        argument = bytearray(
            struct.pack("<12Q", 96, flags, at, end, 0, where, _REGIONS, 0, inverted, mask, 0, mask)
        )
        filled = fcntl.ioctl(pagemap, _SCAN, argument)
        for number in range(filled):
            first, last, _ = struct.unpack_from("<QQQ", regions, 24 * number)
            pages += (last - first) // _PAGE
        (at,) = struct.unpack_from("<Q", argument, 32)
        if filled < _REGIONS:
            break
    return pages


def _writable(pid: int) -> list[tuple[int, int]]:
    """The private writable mappings of a process."""
    return [
        (each.start, each.end)
        for each in processes.mappings(pid)
        if each.rights[1] == "w" and each.rights[3] == "p" and not each.path.startswith("[v")
    ]


class Tracker:
    """The memory of one process. Made in a thread that ends soon after (see `userfaultfd_of`)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = userfaultfd_of(pid)
        try:
            _enable(self._fd)
            self._register()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def _register(self) -> None:
        for start, end in _writable(self._pid):
            # one that is refused stays outside: told as a new mapping for ever, which errs on the safe side
            with contextlib.suppress(OSError):
                _protect(self._fd, start, end)

    def reset(self) -> None:
        """Forget what was written until now; mappings that came since are taken in. The process is frozen."""
        self._register()
        with self._pagemap() as pagemap:
            _scan(pagemap, 0, _TOP, _PROTECT, 0, _ALLOWED | _WRITTEN)

    def written(self) -> tuple[int, int]:
        """Pages written since the last reset, and mappings that came since."""
        with self._pagemap() as pagemap:
            # the mark is one of the whole mapping, so its first page tells
            fresh = sum(
                _scan(pagemap, start, start + _PAGE, 0, _ALLOWED, _ALLOWED) > 0
                for start, _ in _writable(self._pid)
            )
            return _scan(pagemap, 0, _TOP, 0, 0, _ALLOWED | _WRITTEN), fresh

    @contextlib.contextmanager
    def _pagemap(self) -> Iterator[int]:
        try:
            with open(f"/proc/{self._pid}/pagemap", "rb", buffering=0) as pagemap:
                yield pagemap.fileno()
        except OSError as error:
            raise InspectError(f"memory of process {self._pid}: {error.strerror}") from None
