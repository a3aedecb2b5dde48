"""Compiled functions of capabilities, called from the loop by their address.

The loop is compiled once and kept on disk whatever functions it is given, since their addresses are data: a
gate or a node costs the compilation of its own few lines, which is kept on disk too, and an indirect call
(some nanoseconds) for each packet that meets it. Links without a gate pay one comparison.

A **gate** stands before a link's queue and sees every packet that is offered to it::

    @gate
    def police(now, packet, state):
        head = carray(packet, 1)[0]             # a record of `layout.PACKET`: size, tag, flags…
        meters = carray(state, COUNT, METER)    # the NumPy array that `Simulation.set_gate` was given
        …                                       # meters[head.tag]: read, write
        head.virtual_delay += delay             # what Vegas adds to its round trip
        return PASS                             # or DROP, or MARK (a packet that takes marks gets one)

A **node** is a program in the network, or at its edge: an aggregating switch, a worker, a server. It is
called when a packet comes to it, with the number of the port that stands in the packet's route, and at
``WAKE`` when its time has come::

    @node
    def switch(now, port, packet, state, outbox, reply):
        answer = carray(reply, 1)[0]
        answer.wake = now + …                   # when to be called next (NEVER: not at all)
        out = carray(outbox, OUTBOX)[0]         # blank packets
        out.hop, out.flow, out.size = …         # where a route begins, the flow that it is counted for
        answer.count = 1                        # so many of them are sent, in their order
        return CONSUME                          # or FORWARD: the packet goes on along its route

The words ``word0`` to ``word3`` of its packets are a node's own. Neither may raise, nor keep a pointer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

from windtunnel.base.compiled import c_callable
from windtunnel.engines.packets.layout import PACKET, REPLY

_PACKETS = types.CPointer(from_dtype(PACKET))
_REPLY = types.CPointer(from_dtype(REPLY))
_WORD = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()


def gate(function: Callable[..., int]) -> Any:
    """Compile a gate: (now, packet, state) -> PASS, DROP or MARK."""
    return c_callable(types.int64(types.int64, _PACKETS, types.voidptr))(function)


def node(function: Callable[..., int]) -> Any:
    """Compile a node: (now, port, packet, state, outbox, reply) -> FORWARD or CONSUME."""
    signature = types.int64(types.int64, types.int64, _PACKETS, types.voidptr, _PACKETS, _REPLY)
    return c_callable(signature)(function)


@intrinsic  # type: ignore[untyped-decorator]
def call_gate(_typing: Any, address: Any, now: Any, packet: Any, state: Any) -> Any:
    """The verdict of the gate at ``address``; ``state`` is an address too."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD, _POINTER, _POINTER])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(
            function,
            [arguments[1], builder.bitcast(arguments[2], _POINTER), builder.inttoptr(arguments[3], _POINTER)],
        )

    return types.int64(types.int64, types.int64, packet, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_node(
    _typing: Any, address: Any, now: Any, port: Any, packet: Any, state: Any, outbox: Any, reply: Any
) -> Any:
    """The verdict of the node at ``address``; ``packet``, ``outbox`` and ``reply`` are records (of the outbox
    the first)."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD, _WORD, _POINTER, _POINTER, _POINTER, _POINTER])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        head, out, answer = (builder.bitcast(arguments[place], _POINTER) for place in (3, 5, 6))
        return builder.call(
            function,
            [arguments[1], arguments[2], head, builder.inttoptr(arguments[4], _POINTER), out, answer],
        )

    signature = types.int64(types.int64, types.int64, types.int64, packet, types.int64, outbox, reply)
    return signature, generate
