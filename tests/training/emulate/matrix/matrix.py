"""``make matrix``: the same scripts with several builds of PyTorch, and whether they give the same numbers.

Each build is installed into an environment of its own, which takes gigabytes; what is installed once is found
again the next time. Then every script is emulated with each of them, and the table goes to
docs/benchmarks/frameworks.md. A build with CUDA kernels must give every number of the CPU build of its
version.

    python tests/training/emulate/matrix/matrix.py                # the builds of the table
    python tests/training/emulate/matrix/matrix.py 2.14.1-cuda    # others: printed, not written

Exit status 0: all ran, and equal; 1: one failed or differs; 2: a build cannot be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "benchmarks" / "frameworks.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->"
HEAD = (
    "| script | PyTorch | iteration | peak reserved | equal to the CPU build |",
    "|---|---|---|---|---|",
)
CLUSTER = "h100-sxm:2x8"
PROGRAM = ROOT / "examples" / "train_llama.py"
SIZE = ("--size", "debug")
SCRIPTS = {
    "DDP": ("--parallel", "ddp"),
    "FSDP2": ("--parallel", "fsdp"),
    "TP 2 × FSDP2": ("--parallel", "fsdp", "--tp", "2"),
    "PP 2 × TP 2 × FSDP2": ("--parallel", "fsdp", "--tp", "2", "--pp", "2"),
    "FSDP2, compiled": ("--parallel", "fsdp", "--compile"),
}
OWN = ("run_id", "created_at", "directory", "versions", "wall_time_s", "capture_time_s", "peak_rss_bytes")
"""What a summary says of its run, and not of the job."""


@dataclass(frozen=True)
class Build:
    """One of PyTorch's wheels: ``kind`` is ``cpu`` or ``cuda``."""

    version: str
    kind: str

    @classmethod
    def parse(cls, text: str) -> Build:
        """From ``2.13.0-cuda``."""
        version, dash, kind = text.partition("-")
        if not dash or kind not in ("cpu", "cuda") or not version[:1].isdigit():
            raise argparse.ArgumentTypeError(f"{text!r} is no build: write it as 2.13.0-cpu or 2.13.0-cuda")
        return cls(version, kind)

    @property
    def name(self) -> str:
        return f"{self.version}-{self.kind}"

    @property
    def title(self) -> str:
        return f"{self.version} {'CUDA' if self.kind == 'cuda' else 'CPU'}"

    @property
    def requirement(self) -> str:
        """For pip. ``===`` compares the whole text, so that one build never stands for the other."""
        return f"torch==={self.version}" + ("+cpu" if self.kind == "cpu" else "")

    @property
    def takes(self) -> float:
        """GB on disk, its CUDA libraries included."""
        return 6.0 if self.kind == "cuda" else 1.5


BUILDS = (Build("2.13.0", "cpu"), Build("2.13.0", "cuda"), Build("2.15.0", "cuda"))


class NotInstalled(Exception):
    """A build cannot be had here; says why in one sentence."""


def install(build: Build, into: Path) -> Path:
    """The environment of ``build``, with this tree's windtunnel in it: found, or made now.

    Raises:
        NotInstalled: there is no room for it, or pip does not get it.
    """
    environment, mark = into / build.name, into / build.name / "installed"
    wanted = (
        f"{build.requirement} {ROOT} {hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}"
    )
    if mark.exists() and mark.read_text() == wanted:
        return environment
    into.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(into).free / 1e9
    if not environment.exists() and free < build.takes + 1:
        raise NotInstalled(f"{build.title} takes {build.takes:g} GB, and {into} has {free:.0f} GB left")
    print(f"{build.title}: pip installs it, some {build.takes:g} GB, into {environment}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, build.requirement, "--editable", f"{ROOT}[train]"], check=False)
    if done.returncode != 0:
        raise NotInstalled(f"{build.title}: pip ended with status {done.returncode}")
    mark.write_text(wanted)
    return environment


def emulate(environment: Path, arguments: Sequence[str], home: Path) -> dict[str, Any] | str:
    """The summary of the program with these arguments, or why there is none."""
    command = [str(environment / "bin" / "windtunnel"), "emulate", "--json", "--no-report"]
    done = subprocess.run(
        [*command, "--cluster", CLUSTER, str(PROGRAM), *SIZE, *arguments],
        env=os.environ | {"WINDTUNNEL_HOME": str(home)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary
    lines = done.stderr.strip().splitlines()
    return f"status {done.returncode}: {lines[-1] if lines else 'nothing was said'}"


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """The places at which two summaries differ, without what each says of its own run."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if at or key not in OWN:
                if key not in one or key not in other:
                    yield f"{at}{key}"
                else:
                    yield from differences(one[key], other[key], f"{at}{key}.")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{at}{index}.")
    elif type(one) is not type(other) or one != other:
        yield at.removesuffix(".")


Results = dict[tuple[str, Build], "dict[str, Any] | str"]


def verdict(results: Results, script: str, build: Build) -> str:
    """Whether a script came to the same numbers with ``build`` as with the CPU build of its version."""
    given, same = results[script, build], results.get((script, Build(build.version, "cpu")))
    if isinstance(given, str):
        return "failed"
    if build.kind == "cpu" or not isinstance(same, dict):
        return "–"
    differ = list(differences(same, given))
    return f"no ({len(differ)} figures, the first is `{differ[0]}`)" if differ else "yes"


def row(results: Results, script: str, build: Build) -> str:
    """A line of the table. Its figures are emulated."""
    given = results[script, build]
    if isinstance(given, str):
        figures = ["–", "–"]
    else:
        reserved = max(one["peak_reserved_bytes"] for one in given["ranks"]) / 2**20
        figures = [f"{given['iteration_time_s'] * 1e3:.3f} ms", f"{reserved:,.1f} MiB"]
    return f"| {' | '.join([script, build.title, *figures, verdict(results, script, build)])} |"


def table(results: Results) -> str:
    """All of it, script by script."""
    return "\n".join([*HEAD, *(row(results, script, build) for script, build in results)]) + "\n"


def write(text: str, page: Path) -> None:
    """Put the table between the marks of the page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + text + END + rest.split(END)[1])


def main(words: Sequence[str] | None = None, page: Path = PAGE) -> int:
    """Install, emulate, compare, and write the page where the builds are those of the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("builds", nargs="*", type=Build.parse, help="such as 2.14.1-cuda")
    parser.add_argument("--into", type=Path, default=ROOT / ".matrix", help="where environments are kept")
    given = parser.parse_args(words)
    builds, into = tuple(given.builds) or BUILDS, given.into.absolute()
    try:
        environments = {build: install(build, into) for build in builds}
    except NotInstalled as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    results: Results = {}
    failed = False
    for script, arguments in SCRIPTS.items():
        for build in builds:
            summary = results[script, build] = emulate(environments[build], arguments, into / "home")
            print(row(results, script, build), flush=True)
            if isinstance(summary, str):
                print(f"matrix: {script}, {build.title}: {summary}", file=sys.stderr)
            failed |= verdict(results, script, build) not in ("yes", "–")
    if builds == BUILDS:
        write(table(results), page)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("matrix: stopped; what is installed is found again the next time", file=sys.stderr)
        sys.exit(130)
