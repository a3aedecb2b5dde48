"""System calls that another process makes without noticing.

One of its threads is stopped by ptrace, made to execute the call at the system call instruction of its vDSO,
and put back exactly as it was. A thread stopped inside a blocking call has the kernel's restart mark in its
registers; because they are put back whole, the kernel restarts the call when the thread goes on. Signals
other than the trap of the single step are held back meanwhile. The seccomp filter is suspended for the
stopped thread only (PTRACE_O_SUSPEND_SECCOMP). The kernel lets the thread go on when the tracer dies; only
within the few microseconds of a step would it go on at the wrong place.

A thread in a frozen control group stops too, but does not step until the group is thawed.

Source: ptrace(2), with the order of steps of CRIU's parasite and gdb's inferior calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import time

from windtunnel.linux import LinuxError, processes
from windtunnel.linux.system import checked, libc

POSSIBLE = platform.machine() == "x86_64"
"""Whether this module knows the registers of this machine."""

_SEIZE, _INTERRUPT, _DETACH, _GETREGS, _SETREGS, _STEP, _CONT = 0x4206, 0x4207, 17, 12, 13, 9, 7
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_SUSPEND_SECCOMP = 1 << 21
_EVENT_STOP = 128
_WALL = 0x40000000
_REGISTERS = struct.Struct("<27Q")
_RDX, _RSI, _RDI, _RAX, _ORIG_RAX, _RIP, _CS, _R10, _R8, _R9 = 12, 13, 14, 10, 15, 16, 17, 7, 9, 8
_ARGUMENTS = (_RDI, _RSI, _RDX, _R10, _R8, _R9)
_USER_CODE = 0x33
_STEP_SECONDS = 10.0
"""Between the steps there is no way back, so they are waited for, however busy the machine is."""
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    checked(libc.ptrace(request, thread, address, data), "ptrace")


class Stopped:
    """A thread of another process, stopped within ``seconds``; ``close`` lets it go on. Raises OSError.

    All of it happens in one thread of this process: the end of that one, too, lets the other one go on.
    ``by_signal``: one that a signal has stopped is taken as it is; else it is refused.
    """

    def __init__(self, thread: int, seconds: float, *, by_signal: bool = False) -> None:
        if not POSSIBLE:
            raise LinuxError(f"it cannot be done on machines of the kind {platform.machine()}")
        self.thread, self._deadline = thread, time.monotonic() + seconds
        _ptrace(_SEIZE, thread, 0, _SUSPEND_SECCOMP)
        self._halted = False
        self._signal = 0
        try:
            _ptrace(_INTERRUPT, thread)
            while True:
                event, number = self._wait()
                if event == _EVENT_STOP and (number == signal.SIGTRAP or by_signal):
                    break
                if event == _EVENT_STOP:
                    raise LinuxError("it is stopped by a signal")
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
            event = os.waitid(os.P_PID, self.thread, os.WSTOPPED | os.WNOHANG | _WALL)
            if event is not None:
                self._halted = True
                return event.si_status >> 8, event.si_status & 0x7F
            if time.monotonic() > self._deadline:
                raise LinuxError("it did not stop in time")
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)

    def registers(self) -> list[int]:
        buffer = ctypes.create_string_buffer(_REGISTERS.size)
        _ptrace(_GETREGS, self.thread, 0, ctypes.addressof(buffer))
        return list(_REGISTERS.unpack(buffer.raw))

    def set_registers(self, values: list[int]) -> None:
        buffer = ctypes.create_string_buffer(_REGISTERS.pack(*values), _REGISTERS.size)
        _ptrace(_SETREGS, self.thread, 0, ctypes.addressof(buffer))

    def mask(self) -> int:
        value = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, self.thread, 8, ctypes.addressof(value))
        return value.value

    def set_mask(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        _ptrace(_SETSIGMASK, self.thread, 8, ctypes.addressof(value))

    def step(self) -> None:
        """Execute one instruction."""
        self._deadline = time.monotonic() + _STEP_SECONDS
        while True:
            _ptrace(_STEP, self.thread)
            self._halted = False
            event, number = self._wait()
            if not event and number == signal.SIGTRAP:
                return
            # only what cannot be held back comes here; it is passed on at the end
            self._signal = 0 if event else number
            if self._signal != signal.SIGSTOP:
                raise LinuxError("a signal came in between")

    def close(self) -> None:
        if not self._halted:
            try:
                # waits for the stop that was asked for, so that it can be taken back
                self._deadline = time.monotonic() + 0.05
                self._wait()
            except OSError:
                return
        try:
            _ptrace(_DETACH, self.thread, 0, self._signal)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise


class InjectedCalls:
    """System calls of a stopped thread of ``pid``: ``calls(number, argument, …)`` is what the kernel answers.

    Raises OSError for an error of the call, and when it could not be made. Each leaves the thread as it was.
    """

    def __init__(self, pid: int, stopped: Stopped) -> None:
        self._stopped = stopped
        self._instruction = _system_call_instruction(pid)

    def __call__(self, number: int, *arguments: int) -> int:
        registers, mask = self._stopped.registers(), self._stopped.mask()
        if registers[_CS] != _USER_CODE:
            raise LinuxError("it is a 32-bit program")
        values = list(registers)
        values[_RIP], values[_RAX] = self._instruction, number
        for place, register in enumerate(_ARGUMENTS):
            values[register] = arguments[place] & 2**64 - 1 if place < len(arguments) else 0
        values[_ORIG_RAX] = 2**64 - 1  # no call to restart
        self._stopped.set_mask(2**64 - 1 & ~(1 << (signal.SIGTRAP - 1)))
        try:
            self._stopped.set_registers(values)
            self._stopped.step()
            result = self._stopped.registers()[_RAX]
        finally:
            self._stopped.set_registers(registers)
            self._stopped.set_mask(mask)
        if result > 2**64 - 4096:
            raise OSError(2**64 - result, os.strerror(2**64 - result))
        return result


def _system_call_instruction(pid: int) -> int:
    """The address of a ``syscall`` instruction in the vDSO of a process."""
    for each in processes.mappings(pid):
        if each.path == "[vdso]":
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(each.start)
                at = memory.read(each.end - each.start).find(b"\x0f\x05")
            if at >= 0:
                return each.start + at
    raise LinuxError("it has no vDSO")


def running(pid: int) -> int:
    """A thread of a process that has not ended: the main one may be gone first. Raises OSError."""
    for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: thread != pid):
        if next(iter(processes.stat(pid, str(thread))), "X") not in "ZX":
            return thread
    raise LinuxError("it ended")
