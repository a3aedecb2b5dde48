"""The compiled program of the inspector: found beside its source, named by the source's digest.

BPF code is the same for every machine of one byte order, so one object is shipped. It is rebuilt with clang
by ``python -m windtunnel.agents.sandbox.live.inspect.native``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.base import native
from windtunnel.base.errors import UserError

FOLDER = Path(__file__).parent / "bpf"
SOURCE = FOLDER / "turn.bpf.c"


def object_name() -> str:
    return f"turn-{native.digest([SOURCE])}.o"


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
    """Compile the program without debug or type data. Raises UserError with the compiler's words."""
    clang, strip = shutil.which("clang"), shutil.which("llvm-strip") or shutil.which("llvm-strip-14")
    if clang is None or strip is None:
        raise UserError(
            "building the program needs clang and llvm-strip: apt-get install clang llvm libbpf-dev"
        )
    includes = [f"-I{path}" for path in sorted(Path("/usr/include").glob("*-linux-gnu"))]
    options = ["-O2", "-target", "bpf", "-mcpu=v3", "-Wall", "-Werror", *includes]
    with tempfile.TemporaryDirectory() as scratch:
        made = f"{scratch}/turn.o"
        native.compiled([clang, *options, "-c", str(SOURCE), "-o", made], SOURCE.name)
        sections = ["--remove-section=.BTF", "--remove-section=.BTF.ext"]
        native.compiled([strip, "-g", *sections, made], SOURCE.name)
        shutil.copyfile(made, target)


if __name__ == "__main__":
    native.rebuilt(FOLDER, object_name(), "turn-*.o", build)
