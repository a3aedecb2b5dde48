"""Every name of CUDA's that a trainer touches is known, and does what the table of names says of it; scripts
that use PyTorch widely run, and hold their own assertions."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conformance.training.emulate.programs.real_names import real
from training.emulate.capturing import capture
from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live import names

PROGRAMS = Path(__file__).parent / "programs"
STRANGERS = (
    "transformers", "accelerate", "lightning", "pytorch-lightning", "torchtitan", "deepspeed",
    "megatron-core", "torchao",
)  # fmt: skip
OF_TORCH = ("distributed", "nn", "optim", "amp", "utils/data", "utils/checkpoint.py")
FAMILY = r"torch\.(?:cuda|accelerator|backends\.(?:cuda|cudnn|cusparselt))\b"
USED = re.compile(rf"(?<![\w./]){FAMILY}(?:\.\w+)+")
IMPORTED = re.compile(rf"from ({FAMILY}(?:\.\w+)*) import (\([^)]*\)|[^\n]*)")
MODULES = (
    "torch.cuda", "torch.cuda.memory", "torch.cuda.random", "torch.cuda.graphs", "torch.cuda.nvtx",
    "torch.cuda.profiler", "torch.cuda.comm", "torch.cuda.amp", "torch.cuda.tunable", "torch.cuda.nccl",
    "torch.cuda.gds", "torch.cuda.green_contexts", "torch.accelerator", "torch.accelerator.memory",
    "torch.backends.cuda",
)  # fmt: skip


def touched(source: str) -> set[str]:
    """The dotted names of the family that a file names."""
    dotted = set(USED.findall(source))
    for module, what in IMPORTED.findall(source):
        imported = re.sub(r"#.*|\bas\s+\w+", "", what)
        dotted |= {f"{module}.{name}" for name in re.findall(r"\w+", imported)}
    return dotted


def first_thing(name: str) -> str:
    """A dotted name up to the first thing in it that is no module: a method belongs to its class."""
    holder: object = torch
    *parts, _ = name.split(".")[1:]
    done = "torch"
    for part in parts:
        if not hasattr(holder, part):
            try:
                importlib.import_module(f"{done}.{part}")
            except ImportError:
                break
        holder, done = getattr(holder, part), f"{done}.{part}"
        # torch.backends.cudnn is an object in a module's place
        if not isinstance(holder, ModuleType):
            return done
    return name


@cache
def table() -> set[str]:
    return {*real(), *names.STOOD_IN, *names.REFUSED}


def listed(name: str) -> str:
    """A name as the table has it: ``torch.cuda.MemPool`` for ``torch.cuda.memory.MemPool``."""
    module, _, last = name.rpartition(".")
    return name if name in table() else f"{names.SAME.get(module, module)}.{last}"


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def unknown(sources: list[Path]) -> dict[str, str]:
    """Names that the table does not have, each with a file that touches it."""
    files = {}
    for path in sources:
        source = path.read_text(errors="replace")
        if "torch." not in source:
            continue
        for name in touched(source):
            short = listed(first_thing(name))
            # what is private to CUDA's own tools is Python on top of the rest
            of_a_tool = short.startswith(("torch.cuda._memory_viz.", "torch.cuda._pin_memory_utils."))
            if short not in table() and not is_module(short) and not of_a_tool:
                files[short] = str(path)
    return files


@pytest.mark.parametrize("package", STRANGERS)
def test_what_a_stranger_touches_is_known(package: str) -> None:
    try:
        installed = files(package) or []
    except PackageNotFoundError:
        pytest.skip(f"needs {package}: pip install windtunnel[strangers]")
    sources = [
        Path(str(file.locate())) for file in installed if file.suffix == ".py" and file.parts[0] != "test"
    ]
    assert len(sources) > 50
    assert unknown(sources) == {}


def test_what_torch_itself_touches_is_known() -> None:
    root = Path(torch.__file__).parent
    sources = [
        path
        for part in OF_TORCH
        for path in ((root / part).rglob("*.py") if (root / part).is_dir() else [root / part])
    ]
    assert len(sources) > 200
    assert unknown(sources) == {}


@pytest.mark.parametrize("module", MODULES)
def test_what_torch_documents_is_known(module: str) -> None:
    holder = importlib.import_module(module)
    missing = [
        name
        for name in holder.__all__
        if listed(f"{module}.{name}") not in table() and not isinstance(getattr(holder, name), ModuleType)
    ]
    assert missing == []


def test_a_name_is_listed_once() -> None:
    known = [*real(), *names.STOOD_IN, *names.REFUSED]
    assert len(known) == len(set(known))
    assert all(names.find(name) for name in known), "a name that no PyTorch has"


@pytest.mark.slow
def test_every_name_does_what_the_table_says() -> None:
    (slice_,) = capture(str(PROGRAMS / "surface.py"))
    approximations = {note.text for note in slice_.notes if note.kind is NoteKind.APPROXIMATION}
    assert {f"{name}: {sentence}" for name, sentence in names.STOOD_IN.items()} <= approximations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"), [("device.py", (0, 3)), ("models.py", (0,)), ("parallel.py", (0, 5))]
)
def test_a_script_of_many_parts_runs(name: str, ranks: tuple[int, ...]) -> None:
    slices = capture(str(PROGRAMS / name), ranks=ranks)
    assert [slice_.rank for slice_ in slices] == list(ranks)
    assert all(len(slice_.events) > 50 for slice_ in slices)


@pytest.mark.slow
def test_every_way_to_communicate_is_recorded_with_its_bytes() -> None:
    zero, three = capture(str(PROGRAMS / "communicate.py"), ranks=(0, 3))
    for slice_ in (zero, three):
        rows = {(c.kind, c.in_bytes, c.out_bytes, c.peer) for c in slice_.collectives}
        r, world = slice_.rank, 8
        # The ring: 1,000 floats to the right, from the left.
        assert ("send", 4000, 0, (r + 1) % world) in rows and ("recv", 0, 4000, (r - 1) % world) in rows
        # Rank r sends r + 1 rows of 4 floats to each rank, and hears 1 + 2 + … + 8 of them.
        assert ("all_to_all", 16 * (r + 1) * world, 16 * 36, -1) in rows
        # Lists of 7 x 3 floats.
        assert ("all_gather", 84, 84 * world, -1) in rows and ("reduce_scatter", 84 * world, 84, -1) in rows
        assert ("reduce", 84, 84, 1) in rows and ("broadcast", 84, 84, 1) in rows
        assert any(kind == "barrier" for kind, *_ in rows)
        gathers = {(c.in_bytes, c.out_bytes) for c in slice_.collectives if c.kind == "gather"}
        assert gathers == ({(84, 84 * world)} if r == 0 else {(84, 0)})
        backends = Counter(c.backend for c in slice_.collectives)
        assert backends["gloo"] >= 1 and backends["nccl"] > 10
    halves = next(c for c in three.collectives if c.kind == "all_reduce" and c.in_bytes == 44)
    assert three.groups[halves.group].ranks == (0, 1, 2, 3)
    outer = [group.ranks for group in three.world_groups if group.label == "outer"]
    assert outer == [(0, 3), (4, 7)], "the other half is split in the same way"
    pairs = next(c for c in three.collectives if c.kind == "all_reduce" and c.in_bytes == 32)
    assert three.groups[pairs.group].ranks in ((2, 3), tuple(range(1, 8, 2)))
