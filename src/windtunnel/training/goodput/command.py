"""The advice as the command line that follows it."""

from __future__ import annotations

import shlex

from windtunnel.training.goodput.model import (
    MEMORY,
    RUN,
    STORAGE,
    TEMPLATES,
    WITH_SPARE,
    Question,
    RecoveryAdvice,
)

LISTEN = "0.0.0.0:29400"


def commands(
    advice: RecoveryAdvice, question: Question, per_host: int, script: str, persist: str
) -> dict[str, str]:
    """``windtunnel train ..`` for each scheme that was emulated, the recommended one first.

    Hosts come by ``windtunnel host``, with ``--domain`` where copies are placed across domains. ``per_host``:
    ranks of a host. ``persist``: URL of the storage.
    """
    there = {result.scheme for result in advice.results}
    names = sorted((name for name in RUN if name in there), key=lambda name: name != advice.scheme)
    return {name: _command(name, advice, question, per_host, script, persist) for name in names}


def _command(
    name: str, advice: RecoveryAdvice, question: Question, per_host: int, script: str, persist: str
) -> str:
    chosen = advice.chosen
    words = ["windtunnel", "train", "--external-hosts", "--listen", LISTEN]
    words += ["--hosts", str(question.job.hosts), "--per-host", str(per_host)]
    spares = 1 if name == WITH_SPARE else 0 if name == TEMPLATES else question.spares or 0
    if spares:
        words += ["--spares", str(spares)]
    if name == TEMPLATES:
        words += ["--on-loss", "shrink", "--min-hosts", str(advice.smallest)]
    every, to_storage = chosen.every, advice.intervals[name]
    if name == STORAGE:
        every = to_storage
        words += ["--on-loss", "restart", "--copies", "1"]
    if name in (MEMORY, WITH_SPARE):
        words += ["--copies", str(chosen.copies), "--placement", chosen.placement.kind]
    if name == TEMPLATES:  # layers are written by the program itself, a PipelineTrainer
        return shlex.join([*words, script, "--checkpoint", persist, "--checkpoint-every", str(to_storage)])
    words += ["--every", str(every), "--persist", persist, "--persist-every", str(to_storage)]
    return shlex.join([*words, script])
