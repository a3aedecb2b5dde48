"""Why CRIU refused, in one sentence: which process, what resource, and what to do.

CRIU says it in its log, in its own words and in the middle of lines that are harmless or only follow from
others. ``explain_dump`` and ``explain_restore`` take the first line that is known (messages.py) and name the
process by its command; a line that nothing knows is handed on as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from windtunnel.agents.sandbox.live.criu.messages import ANONYMOUS, DEVICES, DUMP, FAMILIES, RESTORE
from windtunnel.base.errors import HostError
from windtunnel.base.units import amount

LINE = re.compile(r"^(?:pie: )?(?: *\d+: )?Error \((?P<where>[^)]*)\): (?P<text>.*)$")
HARMLESS = re.compile(r"rlimit: Can't setup|cgroupd: recv req error|Dumping FAILED|Restoring FAILED")
PID = re.compile(r"\(pid: (\d+)\)|mapping of (\d+)|(?:zombie|task|detach from|namespace for|PID) (\d+)")
AFTERMATH = re.compile(
    r"Unable to detach|Unable to kill|failed with -\d|Unexpected (?:exit|child)|is trimmed"
)


class CriuError(HostError):
    """CRIU is missing, refused or failed. ``details`` holds the lines of its log that say so."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def explain_dump(log: str, init: int) -> str:
    """Why a dump failed; ``init`` is the first process of the sandbox, named when the log names none."""
    lines = real_errors(log)
    for line in lines:
        for pattern, sentence in DUMP:
            if found := re.search(pattern, line):
                pid = next((pid for text in lines if (pid := pid_of(text))), 0)
                return f"process image: {who(pid or init)} {_fill(sentence, found, line)}"
    return f"process image: CRIU failed: {lines[0] if lines else _last(log)}"


def explain_restore(log: str) -> str:
    """Why a restore failed."""
    lines = real_errors(log)
    for line in lines:
        for pattern, sentence in RESTORE:
            if found := re.search(pattern, line):
                return f"process restore: {_fill(sentence, found, line)}"
    return f"process restore: CRIU failed: {lines[0] if lines else _last(log)}"


def real_errors(log: str) -> list[str]:
    """The texts of the error lines without repetition, those that only follow from others last."""
    texts: dict[str, None] = {}
    for line in log.splitlines():
        found = LINE.match(line)
        if found and not HARMLESS.search(found["text"]):
            texts[found["text"].strip()] = None
    return sorted(texts, key=lambda text: AFTERMATH.search(text) is not None)


def _last(log: str) -> str:
    """What a log without an error line ends with: CRIU may not even have started."""
    said = [line.strip() for line in log.splitlines() if line.strip() and not HARMLESS.search(line)]
    return said[-1] if said else "it says nothing in its log"


def pid_of(text: str) -> int:
    """The host's pid that a line speaks of; 0 for none."""
    found = PID.search(text)
    return int(next(group for group in found.groups() if group)) if found else 0


def who(pid: int) -> str:
    """``command (process 7)``: the command line and the number inside the sandbox."""
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
        if not command:
            command = Path(f"/proc/{pid}/comm").read_text().strip()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"process {pid}"
    inside = next((line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")), str(pid))
    short = command if len(command) <= 60 else command[:57] + "..."
    return f"{short} (process {inside} inside)"


def _fill(sentence: str, found: re.Match[str], line: str) -> str:
    groups = [group for group in found.groups() if group] or ["?"]

    def value(place: re.Match[str]) -> str:
        if place["name"] == "line":
            return line
        text = groups[min(int(place["name"]), len(groups) - 1)]
        match place["form"]:
            case "MB":
                return amount(int(text))
            case "family":
                return FAMILIES.get(text, f"a socket of family {text}")
            case "anonymous":
                return next(
                    (name for key, name in ANONYMOUS.items() if key in text), f"a kernel object ({text})"
                )
            case "device":
                return DEVICES.get(text) or DEVICES.get(text.split(":")[0]) or f"the device {text}"
        return text

    return re.sub(r"\{(?P<name>\d|line)(?::(?P<form>\w+))?\}", value, sentence)
