"""What windtunnel raises for its users, in five families: their input, their program, the host beneath both,
a verdict that they asked for, and less than they asked for.

A message names a parameter as Python's callers do, between backticks: `fail_on`. The command line puts its
own flag there, where the verb that was called has it. Whatever else is an exception here stays inside the
part that raises it.
"""

from typing import Any


class WindtunnelError(Exception):
    """Any of the five. ``status``: the exit status that the command line ends with. ``details``: printed
    before the sentence, empty where that says all."""

    status = 1

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UserError(WindtunnelError):
    """Bad input. The message is one sentence: file, field, value, what is accepted. Exit status 2."""

    status = 2


class ScriptError(WindtunnelError):
    """The user's program failed by itself (raised, exited, or hung). Exit status 1.

    ``details`` holds the program's own traceback.
    """


class HangError(ScriptError):
    """The user's program does not end: its ranks wait for each other for ever, or one goes no further."""


class VerdictError(WindtunnelError):
    """What came out is what the user asked to fail on (``fail_on``). Exit status 3.

    The message is one sentence. ``run`` is the `windtunnel.Run` that was found to be so, None where there is
    none (a job that hangs).
    """

    status = 3

    def __init__(self, message: str, run: Any = None, details: str = "") -> None:
        super().__init__(message, details)
        self.run = run


class LessError(WindtunnelError):
    """What was asked for was not reached, though nothing was wrong with input or program. Exit status 3.

    The message is one sentence: what is missing, and what to do where that will do.
    """

    status = 3


class HostError(WindtunnelError):
    """A host, its kernel, its disk or its files did not do what was needed of them. Exit status 1.

    The message is one sentence that says what was to be done and what was in the way.
    """
