"""``make mutants [NAME=training]``: changed rules, one at a time, and whether the net catches each.

A mutant lives in a copy of the package. One of a policy is caught where the recorded log is decided anew
otherwise (or its twin, or an effect, comes out otherwise); one of live where a fresh run does other than it
decided. A process that fails for another reason has caught nothing: the mutant is then to be mended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from parity import AREAS, Mutant
from parity.record import OTHERWISE

ROOT = Path(__file__).parent.parent
AT_ONCE = 2
LONGEST = 900.0  # seconds that one may take


def mutants(*names: str) -> list[Mutant]:
    """Those of the capabilities, or areas, that begin with one of ``names``; all where there is none."""
    areas = [area for area in AREAS if not names or any(name.startswith(area) for name in names)]
    table = [mutant for area in areas for mutant in import_module(f"parity.{area}").MUTANTS]
    return [one for one in table if not names or one.capability.startswith(names)]


def mutated(mutant: Mutant, package: Path) -> str:
    """The text of its file below ``package`` with the other rule.

    Raises:
        ValueError: the rule does not stand there once.
    """
    text = (package / mutant.file).read_text()
    if text.count(mutant.rule) != 1:
        raise ValueError(f"{mutant.file}: {mutant.rule!r} stands {text.count(mutant.rule)} times, not once")
    return text.replace(mutant.rule, mutant.other)


def put_to_test(mutant: Mutant) -> tuple[str, str, float]:
    """What became of it (``caught``, ``SURVIVED`` or ``ERROR``), the first that was said, and the seconds."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        package = source / "windtunnel"
        (package / mutant.file).write_text(mutated(mutant, package))
        paths = os.pathsep.join(map(str, (source, ROOT / "tests", ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(Path(folder) / "numba")}
        words = ["--check" if mutant.live else "--recorded", mutant.capability]
        command = [sys.executable, "-m", "parity.record", *words]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            return "ERROR", f"not over within {LONGEST:g} s", time.monotonic() - began
    lines = done.stdout.strip().splitlines() or [""]
    verdict = {OTHERWISE: "caught", 0: "SURVIVED"}.get(done.returncode, "ERROR")
    said = lines[0] if verdict == "caught" else (done.stderr.strip().splitlines() or [""])[-1]
    return verdict, said, time.monotonic() - began


def main(names: list[str]) -> int:
    table = mutants(*names)
    bad = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, (verdict, said, seconds) in zip(table, pool.map(put_to_test, table), strict=True):
            bad += verdict != "caught"
            world = "live" if mutant.live else "policy"
            print(f"{verdict:8} {seconds:4.0f} s  {mutant.capability} ({world}): {mutant.other.strip()}")
            print(f"                 {said[:200]}", flush=True)
    print(f"{len(table) - bad} of {len(table)} mutants caught")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
