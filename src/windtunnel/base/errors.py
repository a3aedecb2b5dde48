"""What windtunnel raises for its users, in three families: their input, their program, the host beneath both.

Whatever else is an exception here stays inside the part that raises it.
"""


class WindtunnelError(Exception):
    """Any of the three."""


class UserError(WindtunnelError):
    """Bad input. The message is one sentence: file, field, value, what is accepted. Exit status 2."""


class ScriptError(WindtunnelError):
    """The user's program failed by itself (raised, exited, or hung). Exit status 1.

    ``details`` holds the program's own traceback, printed before the sentence.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class HostError(WindtunnelError):
    """A host, its kernel, its disk or its files did not do what was needed of them. Exit status 1.

    The message is one sentence that says what was to be done and what was in the way.
    """
