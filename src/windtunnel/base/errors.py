"""The two errors that end a command: what the user gave is wrong, or the user's script failed."""


class UserError(Exception):
    """Bad input. The message is one sentence: file, field, value, what is accepted. Exit status 2."""


class ScriptError(Exception):
    """The user's program failed by itself (raised, exited, or hung). Exit status 1.

    ``details`` holds the program's own traceback, printed before the sentence.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
