"""The requests, answers and errors of SWE-ReX, for where its package is not installed.

Names, fields and defaults are those of SWE-ReX 1.4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class IsAliveResponse:
    is_alive: bool
    message: str = ""

    def __bool__(self) -> bool:
        return self.is_alive


@dataclass
class CreateBashSessionRequest:
    startup_source: list[str] = field(default_factory=list)
    session: str = "default"
    session_type: Literal["bash"] = "bash"
    startup_timeout: float = 1.0


@dataclass
class CreateBashSessionResponse:
    output: str = ""
    session_type: Literal["bash"] = "bash"


@dataclass
class BashAction:
    command: str
    session: str = "default"
    timeout: float | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    expect: list[str] = field(default_factory=list)
    action_type: Literal["bash"] = "bash"


@dataclass
class BashInterruptAction:
    session: str = "default"
    timeout: float = 0.2
    n_retry: int = 3
    expect: list[str] = field(default_factory=list)
    action_type: Literal["bash_interrupt"] = "bash_interrupt"


@dataclass
class BashObservation:
    output: str = ""
    exit_code: int | None = None
    failure_reason: str = ""
    expect_string: str = ""
    session_type: Literal["bash"] = "bash"


@dataclass
class CloseBashSessionRequest:
    session: str = "default"
    session_type: Literal["bash"] = "bash"


@dataclass
class CloseBashSessionResponse:
    session_type: Literal["bash"] = "bash"


@dataclass
class Command:
    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


@dataclass
class CommandResponse:
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


@dataclass
class ReadFileRequest:
    path: str
    encoding: str | None = None
    errors: str | None = None


@dataclass
class ReadFileResponse:
    content: str = ""


@dataclass
class WriteFileRequest:
    content: str
    path: str


@dataclass
class WriteFileResponse:
    pass


@dataclass
class UploadRequest:
    source_path: str
    target_path: str


@dataclass
class UploadResponse:
    pass


@dataclass
class CloseResponse:
    pass


class AbstractRuntime:
    """What runs an agent's actions."""


class AbstractDeployment:
    """What starts and stops a runtime."""


class SwerexException(Exception):
    """Any error that SWE-ReX tells of."""


class NonZeroExitCodeError(SwerexException, RuntimeError):
    pass


class NoExitCodeError(SwerexException, RuntimeError):
    pass


class BashIncorrectSyntaxError(SwerexException, RuntimeError):
    def __init__(self, message: str, *, extra_info: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.extra_info = extra_info or {}


class CommandTimeoutError(SwerexException, RuntimeError, TimeoutError):
    pass


class SessionExistsError(SwerexException, ValueError):
    pass


class SessionDoesNotExistError(SwerexException, ValueError):
    pass


class DeploymentNotStartedError(SwerexException, RuntimeError):
    def __init__(self, message: str = "Deployment not started") -> None:
        super().__init__(message)


class DeploymentStartupError(SwerexException, RuntimeError):
    pass
