"""What an emulation must not come to, for CI: ``--fail-on oom``, ``hang``, ``slower:10%``.

A run that is done is held against what was asked; what it fails is said in one sentence each. *Slower*
needs something to be slower than: a run or a summary that the user names, else the last run of the same
script, arguments, cluster and options in the store that did not fail its own verdict, so that a job that got
slow is not what the next one is compared with. Where there is none that is an error, never a pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.base import units
from windtunnel.base.errors import UserError
from windtunnel.report import text
from windtunnel.store.runs import Run, Store
from windtunnel.training.emulate.summary import BaselineFacts, Summary, VerdictFacts

ACCEPTED = "accepted are oom, hang and slower:10%"
COMPARED = ("script", "args", "cluster", "slow", "jitter", "alloc_conf")
"""Inputs of a run in which the default baseline is the same."""


@dataclass(frozen=True)
class FailOn:
    """What fails a run. ``asked``: as it was given; ``slower``: the share by which an iteration may be longer
    than the baseline's, None where that was not asked."""

    asked: tuple[str, ...] = ()
    slower: float | None = None

    @classmethod
    def parse(cls, given: Sequence[str] | str) -> FailOn:
        """From the words of ``--fail-on``, each alone or several between commas.

        Raises:
            UserError: a word is not known, or two limits of slowness are given.
        """
        texts = [given] if isinstance(given, str) else given
        asked = dict.fromkeys(word.strip() for one in texts for word in one.split(","))
        limits = []
        for word in asked:
            share = re.fullmatch(r"slower:(\d+(?:\.\d+)?)\s*%", word)
            if share is not None:
                limits.append(float(share[1]) / 100)
            elif word not in ("oom", "hang"):
                raise UserError(f"`fail_on`: {word!r} is not known; {ACCEPTED}")
        if len(limits) > 1:
            raise UserError("`fail_on`: slower is given twice, give one limit")
        return cls(tuple(asked), limits[0] if limits else None)

    @property
    def hang(self) -> bool:
        return "hang" in self.asked

    def baseline(self, named: str | None, inputs: Mapping[str, Any], store: Store) -> BaselineFacts | None:
        """What the run is compared with; None where nothing is. ``named``: a run of ``store`` or the file of
        a summary; ``inputs``: of the run that is about to be.

        Raises:
            UserError: there is no baseline, or what was named is none, or nothing would be compared with it.
        """
        if self.slower is None:
            if named is not None:
                raise UserError("`baseline`: nothing is compared with it, ask for it by `fail_on` slower:10%")
            return None
        if named is None:
            wanted = [inputs[name] for name in COMPARED]

            def alike(run: Run) -> bool:
                verdict = (run.summary or {}).get("verdict")
                return [run.inputs.get(name) for name in COMPARED] == wanted and (
                    verdict is None or bool(verdict["passed"])
                )

            found = store.newest("training.emulate", alike)
            if found is None:
                raise UserError(
                    "`fail_on` slower: the store has no run of this script with these arguments on this "
                    "cluster to compare with, give one by `baseline`, a run or a SUMMARY.json"
                )
            return _facts(found.summary, found.id, f"run {found.id}")
        file = Path(named)
        if file.suffix == ".json" or file.is_file():
            return _facts(_read(file), str(file), str(file))
        run = store.get(named)
        return _facts(run.summary, run.id, f"run {run.id}")

    def judge(self, summary: Summary, baseline: BaselineFacts | None) -> VerdictFacts | None:
        """Whether the run passes, and why not; None where nothing was asked."""
        if not self.asked:
            return None
        reasons = []
        if "oom" in self.asked and not summary.fits:
            reasons.append(text.worst_out_of_memory(summary.to_json()))
        if self.slower is not None and baseline is not None:
            ratio = summary.iteration_time_s / baseline.iteration_time_s
            if ratio > 1 + self.slower:
                reasons.append(
                    f"an iteration takes {units.seconds(summary.iteration_time_s)}, "
                    f"{units.share(ratio - 1)} longer than the {units.seconds(baseline.iteration_time_s)} of "
                    f"{baseline.name}, where {units.share(self.slower)} is allowed"
                )
        return VerdictFacts(fail_on=self.asked, passed=not reasons, reasons=tuple(reasons), baseline=baseline)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"`baseline`: {str(file)!r} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"`baseline`: {str(file)!r} is not JSON ({error})") from None


def _facts(summary: Any, name: str, words: str) -> BaselineFacts:
    seconds = summary.get("iteration_time_s") if isinstance(summary, Mapping) else None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise UserError(f"`baseline`: {words} has no time of an iteration, as an emulation that is done has")
    return BaselineFacts(name, float(seconds))
