"""``make matrix``: the same scripts with several builds of PyTorch, and whether they give the same numbers.

Each build is installed once, into an environment of its own, which takes gigabytes. Then every script is
emulated with each of them, and the table goes to docs/benchmarks/frameworks.md. A build with CUDA kernels
must give every number of the CPU build of its version.

    python tests/conformance/training/emulate/matrix.py                # the builds of the table
    python tests/conformance/training/emulate/matrix.py 2.14.1-cuda    # others: printed, not written

Exit status 0: all ran, and equal; 1: one failed or differs; 2: a build cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import os
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
PROGRAM = ROOT / "examples" / "train_llama.py"
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
        version, _, kind = text.partition("-")
        if kind not in ("cpu", "cuda") or not version[:1].isdigit():
            raise argparse.ArgumentTypeError(f"{text!r} is no build: write it as 2.13.0-cpu or 2.13.0-cuda")
        return cls(version, kind)

    @property
    def title(self) -> str:
        return f"{self.version} {self.kind.upper()}"


BUILDS = (Build("2.13.0", "cpu"), Build("2.13.0", "cuda"), Build("2.15.0", "cuda"))


def install(build: Build, into: Path) -> Path:
    """The environment of ``build``, with this tree's windtunnel in it.

    Raises:
        subprocess.CalledProcessError: pip does not get it; its own words are on stderr.
    """
    environment = into / f"{build.version}-{build.kind}"
    print(f"{build.title}: pip installs it, gigabytes the first time, into {environment}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    # === compares the whole text, so that one build never stands for the other
    torch = f"torch==={build.version}" + ("+cpu" if build.kind == "cpu" else "")
    subprocess.run([*pip, torch, "--editable", f"{ROOT}[train]"], check=True)
    return environment


def emulate(environment: Path, arguments: Sequence[str], home: Path) -> dict[str, Any] | str:
    """The summary of the program with these arguments, or why there is none."""
    command = [str(environment / "bin" / "windtunnel"), "emulate", "--json", "--no-report"]
    done = subprocess.run(
        [*command, "--cluster", "h100-sxm:2x8", str(PROGRAM), "--size", "debug", *arguments],
        env=os.environ | {"WINDTUNNEL_HOME": str(home)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary
    lines = done.stderr.strip().splitlines()
    return f"status {done.returncode}: {lines[-1] if lines else 'nothing was said'}"


def leaves(summary: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Each figure of a summary as it is written, with its place; without what it says of its own run."""
    if isinstance(summary, dict | list):
        pairs = summary.items() if isinstance(summary, dict) else enumerate(summary)
        for key, value in pairs:
            if at or key not in OWN:
                yield from leaves(value, f"{at}{key}.")
    else:
        yield at.removesuffix("."), json.dumps(summary)


def differences(summary: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The places at which two summaries differ."""
    return sorted({place for place, _ in set(leaves(summary)) ^ set(leaves(other))})


Results = dict[tuple[str, Build], "dict[str, Any] | str"]


def verdict(results: Results, script: str, build: Build) -> str:
    """Whether a script came to the same numbers with ``build`` as with the CPU build of its version."""
    summary, same = results[script, build], results.get((script, Build(build.version, "cpu")))
    if isinstance(summary, str):
        return "failed"
    if build.kind == "cpu" or not isinstance(same, dict):
        return "–"
    differ = differences(same, summary)
    return f"no ({len(differ)} figures, the first is `{differ[0]}`)" if differ else "yes"


def row(results: Results, script: str, build: Build) -> str:
    """A line of the table. Its figures are emulated."""
    summary = results[script, build]
    figures = ["–", "–"]
    if not isinstance(summary, str):
        reserved = max(rank["peak_reserved_bytes"] for rank in summary["ranks"]) / 2**20
        figures = [f"{summary['iteration_time_s'] * 1e3:.3f} ms", f"{reserved:,.1f} MiB"]
    return f"| {' | '.join([script, build.title, *figures, verdict(results, script, build)])} |"


def main(words: Sequence[str] | None = None, page: Path = PAGE) -> int:
    """Install, emulate, compare, and write the page where the builds are those of the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("builds", nargs="*", type=Build.parse, help="such as 2.14.1-cuda")
    parser.add_argument("--into", type=Path, default=ROOT / ".matrix", help="where environments are kept")
    options = parser.parse_args(words)
    builds, into = tuple(options.builds) or BUILDS, options.into.absolute()
    try:
        environments = {build: install(build, into) for build in builds}
    except subprocess.CalledProcessError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    results: Results = {}
    for script, arguments in SCRIPTS.items():
        for build in builds:
            summary = results[script, build] = emulate(environments[build], arguments, into / "home")
            print(row(results, script, build), flush=True)
            if isinstance(summary, str):
                print(f"matrix: {script}, {build.title}: {summary}", file=sys.stderr)
    if builds == BUILDS:
        before, rest = page.read_text().split(BEGIN)
        table = "\n".join([*HEAD, *(row(results, *key) for key in results)])
        page.write_text(f"{before}{BEGIN}{table}\n{END}{rest.split(END)[1]}")
    return int(any(verdict(results, *key) not in ("yes", "–") for key in results))


if __name__ == "__main__":
    sys.exit(main())
