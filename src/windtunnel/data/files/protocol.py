"""What the processes ask each other: clients the server of a host, servers and hosts the pipeline beside
it."""

from __future__ import annotations

from typing import Protocol

from windtunnel.data.files.model import FilesHost, Operation, OperationResult, Stat, Status


class FileCalls(Protocol):
    """Of the server of a host. All but `status` raise `NotPrimary` on a host that is not, and OSError as the
    kernel would for the same call."""

    def status(self) -> Status: ...

    def perform(self, operation: Operation, data: bytes) -> OperationResult:
        """Write the operation to the log. One that was performed already is not again."""
        ...

    def sync(self, sequence: int) -> int:
        """Wait until all before ``sequence`` (0: all there is) is on the disks of all hosts."""
        ...

    def read(self, path: str, offset: int, length: int) -> bytes: ...
    def stat(self, path: str) -> Stat: ...
    def names(self, path: str) -> tuple[str, ...]: ...


class HostCalls(Protocol):
    """Of the process of a host that runs the pipeline and stands for the SmartNIC."""

    def status(self) -> Status: ...

    def serving(self) -> Status:
        """As `status`; for the host's own server alone, which says with it that it answers."""
        ...

    def sync(self, sequence: int) -> int: ...

    def admit(self, host: FilesHost) -> int:
        """Take ``host`` into the chain, which has copied what is published. Returns the epoch."""
        ...

    def snapshot(self) -> bytes:
        """What is published: a JSON object of the tree and the position; the log from there on is kept until
        `admit`, or for some time."""
        ...

    def content(self, inode: int, offset: int, length: int) -> bytes: ...
