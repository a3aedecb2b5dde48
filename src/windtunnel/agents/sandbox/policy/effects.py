"""The class of a turn by its effects: the weakest one that loses nothing of it.

The rule for processes: a process image is out of date when processes started or ended, when a process wrote
its memory *and* received input or wrote something out since the image was taken, or when one computed
silently for longer than a threshold. Input alone is no evidence of change, and dirty pages alone are not
either: an idle event loop dirties pages at every tick, and a copy of the older memory continues just as well.

``promote`` is the rule of the mixed restore: newer files under an older process image are sound only as long
as nothing that the image refers to was deleted, replaced or renamed.

Source: Crab (arXiv 2604.28138), section 4: net changes, mapped-file invalidation.
"""

from __future__ import annotations

from collections.abc import Iterable

from windtunnel.agents.sandbox.model import (
    FileChange,
    ProcessEffect,
    References,
    SandboxPart,
    ShellEffect,
    TurnClass,
    TurnEffects,
)

SILENT_CPU = 2.0
"""Seconds of computation, without input or output, that are worth an image."""
IGNORED = ("/.windtunnel/", "/proc/", "/dev/", "/sys/")
"""Path prefixes inside that never count."""


def class_of(
    effects: TurnEffects, references: References, *, has_image: bool = True
) -> tuple[TurnClass, tuple[str, ...]]:
    """The class, and the reasons for it, strongest first.

    ``references`` are those of the newest process image, onto which a weaker checkpoint would be restored;
    ``has_image``: there is one, and it is of these very shells.
    """
    full = [f"in doubt: {doubt.text}" for doubt in effects.doubts if doubt.part is not SandboxPart.FILES]
    full += [
        f"in doubt: {words}" for shell in effects.shells if (words := why_image_needed(shell, has_image))
    ]
    full += [words for process in effects.processes if (words := process_changed(process))]
    files = [change for change in effects.files if not change.path.startswith(IGNORED)]
    full.extend(promote(files, references))
    doubted = [f"in doubt: {doubt.text}" for doubt in effects.doubts if doubt.part is SandboxPart.FILES]
    unseen = effects.files_total > len(effects.files)
    if unseen and references.paths and not full:
        # some changed paths are not listed, so none can be held against what the image refers to
        full.append(f"{effects.files_total} changed paths, more than could be held against open files")
    reasons = [f"{change.change} {change.path}" for change in files[:5]]
    if len(files) > 5 or unseen:
        reasons.append(f"{max(effects.files_total, len(files))} paths in all")
    if full:
        return TurnClass.FULL, (*full, *reasons)
    if files or doubted or unseen:
        return TurnClass.FILES, (*doubted, *reasons)
    if effects.shells:
        return TurnClass.SHELL, tuple(f"state of shell {shell.name}" for shell in effects.shells)
    return TurnClass.NONE, ()


def why_image_needed(shell: ShellEffect, has_image: bool = True) -> str:
    """Why only a process image can keep what became of this shell; empty where its state alone can.

    What a fresh shell cannot be given (descriptors, jobs), an older image of the shell has already: where
    those change, processes or descriptors do, and that is another matter.
    """
    if shell.busy:
        return f"shell {shell.name} is busy"
    if shell.gone:
        return f"shell {shell.name} is gone"
    lacking = shell.not_replayable if has_image else (*shell.resources, *shell.not_replayable)
    return f"shell {shell.name}: {'; '.join(lacking)}" if lacking else ""


def process_changed(process: ProcessEffect) -> str:
    """Why this process needs a newer image; empty when it needs none."""
    who = f"{process.command} ({process.pid})"
    if process.started:
        return f"{who} started"
    if process.ended:
        return f"{who} ended"
    if process.descriptors_changed:
        return f"{who} opened or closed descriptors"
    if process.settings_changed:
        return f"{who} got other limits, another priority or other CPUs"
    if process.shell:
        return ""
    if process.dirty_pages == 0 and process.new_mappings == 0:
        return ""
    if process.inputs is None or process.writes is None:
        return f"{who} may have run, and what it received is not known"
    if process.inputs or process.writes:
        did = "received input" if process.inputs else "wrote"
        return f"{who} wrote memory and {did}"
    if process.cpu > SILENT_CPU:
        return f"{who} computed for {process.cpu:.1f} s"
    return ""


def promote(files: Iterable[FileChange], references: References) -> list[str]:
    """Reasons why newer files do not fit the older image: something that it refers to is gone or another
    file.

    A file that only grew or changed in place is no reason: the image holds its path, not its bytes; unless it
    is mapped, or open for more than appending, where the restore insists on its size.
    """
    reasons = []
    for change in files:
        if change.change in ("deleted", "renamed", "created") and change.path in references.paths:
            reasons.append(f"{change.path}, which a process refers to, was {change.change}")
        elif change.change == "modified" and change.path in references.mapped:
            reasons.append(f"{change.path}, which a process has mapped or open, was modified")
        elif change.change in ("deleted", "renamed") and any(
            path.startswith(change.path + "/") for path in references.paths
        ):
            reasons.append(f"{change.path}, in which a process has files, was {change.change}")
    return reasons
