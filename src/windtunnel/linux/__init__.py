"""What this package asks of a Linux kernel, for every capability: processes, namespaces, links, groups."""

from __future__ import annotations

from windtunnel.base.errors import HostError


class LinuxError(HostError, OSError):
    """What the kernel refused: ``strerror`` says it in words, ``errno`` is its number where it gave one."""

    def __init__(self, words: str, number: int | None = None) -> None:
        super().__init__(words)
        self.errno, self.strerror = number, words

    def __str__(self) -> str:
        return self.strerror or ""
