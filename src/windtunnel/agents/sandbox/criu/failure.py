"""Why CRIU refused, in one sentence: which process, what resource, and what to do.

CRIU says it in its log, in its own words and in the middle of lines that are harmless or only follow from
others. What agents meet has a sentence here; of all else CRIU's own first error is handed on, with those that
follow it. The patterns are those of CRIU 4.2 (criu/*.c); in a sentence ``{0}`` is the pattern's first group.
"""

from __future__ import annotations

import re

from windtunnel.linux import processes

AFTER = 2
"""Errors that are handed on beside the first."""
DUMP = (
    (
        r"Can't dump ghost file (\S+) of \d+ size",
        "holds the deleted file {0} open, larger than the 64 MB that an image takes; let it close the file, "
        "or keep its name",
    ),
    (
        r"Can't create link remap for (\S+?)\.? ",
        "holds {0} open, which was deleted while another name of the same file remains; let it close that",
    ),
    (
        r"Can't lookup mount=\d+ for fd=\d+ path=(\S+)",
        "holds {0} open on a file system that no mount inside shows (a message queue, or one unmounted); let "
        "it close that first",
    ),
    (
        r"Can't dump file \d+ of that type \[\d+\] \(([^)]*)\)",
        "holds a file of a kind that CRIU cannot keep ({0}); let it close that first",
    ),
    (
        "ctty inheritance detected",
        "holds /dev/tty open while another process has the same terminal open, which CRIU cannot keep; let "
        "it close that first",
    ),
    (
        "Non-empty write queue on an in-flight socket",
        "has sent something on a unix socket that the other side has not accepted yet; try again when it has",
    ),
    (
        "External socket is used|Can't dump half of stream unix|Dangling connection|name-less external|"
        "with(?:out| unreachable) peer",
        "is connected by a unix socket to a process outside the sandbox; let it close that first",
    ),
    (
        "Unable to freeze cgroup|Timeout reached",
        "could not be stopped in time: a process waits in the kernel (a dead disk or network file system)",
    ),
)
RESTORE = (
    (
        r"File (\S+) has bad|Can't (?:open|stat)(?: file)? (\S+?)(?: on restore)?: No such|(Can't open cwd)",
        "{0} is not as it was at the checkpoint; restore the files of the same checkpoint",
    ),
    (
        r"(?:fork|clone).*Resource temporarily unavailable",
        "the sandbox's limit of processes is too low for the tree of the checkpoint plus CRIU's own helpers",
    ),
    (
        "Cannot allocate memory|Can't mmap|signal 9",
        "there was not enough memory, on the machine or within the sandbox's limit",
    ),
)
FULL = (("No space left on device", "the disk of the images is full"),)

LINE = re.compile(r"^(?:pie: )?(?: *\d+: )?Error \([^)]*\): (?P<text>.*)$")
HARMLESS = re.compile(r"rlimit: Can't setup|cgroupd: recv req error|Dumping FAILED|Restoring FAILED")
PID = re.compile(
    r"\(pid: (\d+)\)|mapping of (\d+)|(?:zombie|task|detach from|namespace for|PID|ctty pid_real) (\d+)"
)
AFTERMATH = re.compile(
    r"Unable to detach|Unable to kill|failed with -\d|Unexpected (?:exit|child)|is trimmed"
)


def explain_dump(log: str, init: int) -> str:
    """Why a dump failed; ``init`` is the first process of the sandbox, named when the log names none."""
    lines = real_errors(log)
    whose = processes.who(next(filter(None, map(_pid, lines)), init))
    if reason := _sentence(FULL, lines):
        return f"process image: {reason}"
    reason = _sentence(DUMP, lines)
    return (
        f"process image: {whose} {reason}"
        if reason
        else f"process image: CRIU failed at {whose}: {_own(log)}"
    )


def explain_restore(log: str) -> str:
    """Why a restore failed."""
    return f"process restore: {_sentence(RESTORE + FULL, real_errors(log)) or f'CRIU failed: {_own(log)}'}"


def real_errors(log: str) -> list[str]:
    """The texts of the error lines without repetition, those that only follow from others last."""
    texts: dict[str, None] = {}
    for line in log.splitlines():
        match = LINE.match(line)
        if match and not HARMLESS.search(match["text"]):
            texts[match["text"].strip()] = None
    return sorted(texts, key=lambda text: AFTERMATH.search(text) is not None)


def _sentence(sentences: tuple[tuple[str, str], ...], lines: list[str]) -> str:
    """That of the first line which is known; empty where none is."""
    for line in lines:
        for pattern, sentence in sentences:
            if match := re.search(pattern, line):
                return sentence.format(next(filter(None, match.groups()), ""))
    return ""


def _own(log: str) -> str:
    """CRIU's own words. Where there is no error line, CRIU may not even have started."""
    if lines := real_errors(log):
        return "; ".join(lines[: 1 + AFTER])
    errors = [line.strip() for line in log.splitlines() if line.strip() and not HARMLESS.search(line)]
    return errors[-1] if errors else "it says nothing in its log"


def _pid(text: str) -> int:
    """The host's pid that a line speaks of; 0 for none."""
    match = PID.search(text)
    return int(next(group for group in match.groups() if group)) if match else 0
