"""The compiled program: found beside its source, named by the source's digest.

BPF code is the same for every machine of one byte order, so one object is shipped. It is rebuilt with clang
by ``python -m windtunnel.agents.sandbox.live.inspect.native``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from windtunnel.agents.sandbox.errors import InspectError

FOLDER = Path(__file__).parent / "bpf"
SOURCE = FOLDER / "turn.bpf.c"


def object_name() -> str:
    return f"turn-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.o"


def locate() -> Path:
    """Raises InspectError when the object that belongs to the source is not there."""
    path = FOLDER / object_name()
    if not path.exists():
        raise InspectError(
            f"the compiled program {path.name} is missing; build it with clang:"
            " python -m windtunnel.agents.sandbox.live.inspect.native"
        )
    return path


def build(target: Path) -> None:
    """Compile the program without debug or type data. Raises InspectError with the compiler's words."""
    clang, strip = shutil.which("clang"), shutil.which("llvm-strip") or shutil.which("llvm-strip-14")
    if clang is None or strip is None:
        raise InspectError(
            "building the program needs clang and llvm-strip: apt-get install clang llvm libbpf-dev"
        )
    includes = [f"-I{path}" for path in sorted(Path("/usr/include").glob("*-linux-gnu"))]
    with tempfile.TemporaryDirectory() as scratch:
        made = f"{scratch}/turn.o"
        for command in (
            [
                clang,
                "-O2",
                "-target",
                "bpf",
                "-mcpu=v3",
                "-Wall",
                "-Werror",
                *includes,
                "-c",
                str(SOURCE),
                "-o",
                made,
            ],
            [strip, "-g", "--remove-section=.BTF", "--remove-section=.BTF.ext", made],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise InspectError(f"building {SOURCE.name} failed: {done.stderr.strip()[-800:]}")
        part = target.with_suffix(f".{os.getpid()}.part")
        shutil.copyfile(made, part)
        os.replace(part, target)


def main() -> None:
    target = FOLDER / object_name()
    build(target)
    for old in FOLDER.glob("turn-*.o"):
        if old != target:
            old.unlink()
    print(f"built {target.name}")


if __name__ == "__main__":
    main()
