"""Imports point one way, and deciding code is pure: what CONTRIBUTING.md promises, held by the source.

Every test looks at the whole tree and names all that breaks its rule. What still does is in `KNOWN`, and only
there: an entry that is no longer true must be taken out.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

from windtunnel.capabilities import CAPABILITIES, ROOMS

SOURCE = Path(__file__).parent.parent / "src"
GROUND = ("engines", "cluster", "store", "report", "linux", "calibration", "traces")
AREAS = ("training", "serving", "agents", "data", "network", "control", "silicon", "trust", "edge")
NAMES = {entry.name for entry in CAPABILITIES}
FLAT = {entry.name for entry in CAPABILITIES if entry.flat}
# Of a capability whose live world has no folder: what is not of that world.
SHARED = {*ROOMS, "model", "errors", "costs", "protocol", "traces", "calibrate", "adapters"}

CLOCK = {"time", "datetime", "sched"}
PROCESSES = {"socket", "ssl", "subprocess", "threading", "multiprocessing", "asyncio", "trio", "select",
             "selectors", "signal", "concurrent", "httpx", "urllib", "http", "pyroute2"}  # fmt: skip
DISK = {"os", "io", "pathlib", "shutil", "tempfile", "fcntl", "mmap", "ctypes", "sqlite3", "sqlalchemy",
        "fsspec", "psutil", "logging", "random"}  # fmt: skip
WORLD = {
    "windtunnel.store",
    "windtunnel.linux",
    "windtunnel.engines",
    "windtunnel.report",
}

# (who, what it uses and must not), each the name of a room or module.
KNOWN: set[tuple[str, str]] = set()


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    modules = {}
    gc.disable()  # it would look at a million nodes again and again
    for path in sorted((SOURCE / "windtunnel").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    gc.enable()
    return modules


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Of every module what the rules are about, from a single walk."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant, ast.Call, ast.Try)
    return {
        name: [node for node in ast.walk(tree) if isinstance(node, kinds)] for name, tree in trees().items()
    }


def named(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Full names of what these statements import; `from a import b` is a.b where that is a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner != "windtunnel.__version__":
                    yield inner if inner in trees() else node.module


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those of functions or for type checkers only."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            checked = "TYPE_CHECKING" in ast.dump(node.test)
            yield from at_import(node.orelse if checked else node.body + node.orelse)
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from at_import(node.body)
            for handler in getattr(node, "handlers", ()):
                yield from at_import(handler.body)


@cache
def imports() -> dict[str, set[str]]:
    """What every module imports anywhere in it."""
    return {name: set(named(content)) for name, content in nodes().items()}


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """A million nodes are no more looked at for garbage in the tests that follow."""
    yield
    for kept in (trees, nodes, imports):
        kept.cache_clear()


def capability(module: str) -> str | None:
    """The capability that a module belongs to, such as training.emulate."""
    name = ".".join(module.split(".")[1:3])
    return name if name in NAMES else None


def room(module: str) -> str:
    """The part of its capability that a module is in: a room, or another module or package of it."""
    parts = module.split(".")[1:4]
    if ".".join(parts[:2]) in FLAT and len(parts) == 3 and parts[2] not in SHARED:
        parts[2] = "live"
    return ".".join(parts)


def layer(module: str) -> int:
    """0 base, 1 shared ground, 2 capabilities, 3 areas, 4 what puts all together, 5 cli."""
    parts = module.split(".")
    if parts[1:2] == ["base"]:
        return 0
    if len(parts) > 1 and parts[1] in GROUND:
        return 1
    if capability(module):
        return 2
    if len(parts) > 1 and parts[1] in AREAS:
        return 3
    return 5 if parts[1:2] == ["cli"] else 4


def hold(broken: set[tuple[str, str]], known: set[tuple[str, str]]) -> None:
    assert broken - known == set()
    assert known - broken == set(), "no longer broken: take it out of KNOWN"


def test_imports_point_one_way() -> None:
    """cli → what puts all together → areas → capabilities → shared ground → base."""
    broken = {
        (module, used)
        for module, names in imports().items()
        for used in names
        if used.split(".")[0] == "windtunnel" and layer(used) > layer(module)
    }
    broken |= {(name, used) for name, names in imports().items() for used in names if "benchmarks" in used}
    # the table of capabilities is data: whoever may use them may read it
    hold({pair for pair in broken if pair[1] != "windtunnel.capabilities" or layer(pair[0]) < 2}, set())


WORLDS = {f"windtunnel.{name}.{world}" for name in NAMES for world in ("twin", "live")}
# windtunnel.training.emulate.live, also without its beginning, or as a path
MENTIONS = re.compile(
    r"\b(" + "|".join(sorted(name.split(".")[1] for name in NAMES)) + r")[./](twin|live)(?![\w-])"
)
SHORT = {name.split(".")[1]: name for name in NAMES}


def test_no_capability_touches_the_live_or_the_twin_of_another() -> None:
    """Not by import, and not by a string that names such a module (for find_spec, or to start it)."""
    broken = set()
    for module, content in nodes().items():
        mine = capability(module)
        if not mine:
            continue
        texts = [node.value for node in content if isinstance(node, ast.Constant)]
        mentioned = {
            f"{SHORT[match[1]]}.{match[2]}"
            for text in texts
            if isinstance(text, str)
            for match in MENTIONS.finditer(text)
        }
        imported = {
            room(used)
            for used in imports()[module]
            if f"windtunnel.{room(used)}" in WORLDS and capability(used)
        }
        broken |= {(room(module), used) for used in mentioned | imported if not used.startswith(f"{mine}.")}
    hold(broken, {pair for pair in KNOWN if f"windtunnel.{pair[1]}" in WORLDS})


def reached(module: str) -> Iterator[str]:
    """The module, and all modules of the package that are imported with it."""
    visited, queue = {module}, [module]
    while queue:
        yield (name := queue.pop())
        new = {used for used in named(at_import(trees()[name].body)) if used in trees()} - visited
        visited |= new
        queue += new


def test_rooms() -> None:
    """policy: no other room, torch, clock, input or output, nor by what it imports. twin: no live, wall
    clock, sockets or processes. live: no twin, no engines. The table of capabilities says which there are."""
    broken = set()
    for entry in CAPABILITIES:
        folder = SOURCE / "windtunnel" / entry.name.replace(".", "/")
        rooms = {name for name in ROOMS if (folder / name).is_dir() or (folder / f"{name}.py").exists()}
        assert rooms == set(entry.rooms) - ({"live"} if entry.flat else set()), entry.name
    for module, names in imports().items():
        mine, where = capability(module), room(module)
        tops = {name.split(".")[0] for name in names}
        match where.split(".")[2:]:
            case ["policy"]:
                behind = {
                    name for dependency in reached(module) for name in imports()[dependency] | {dependency}
                }
                used = {".".join(name.split(".")[:2]) for name in behind if name.startswith("windtunnel.")}
                banned = CLOCK | PROCESSES | DISK | {"torch"}
                faults = ({name.split(".")[0] for name in behind} & banned) | (used & WORLD)
                faults |= {room(name) for name in behind if f"windtunnel.{room(name)}" in WORLDS}
                calls = (node.func for node in nodes()[module] if isinstance(node, ast.Call))
                if any(isinstance(call, ast.Name) and call.id == "open" for call in calls):
                    faults.add("open")
            case ["twin"]:
                faults = tops & (CLOCK | PROCESSES | {"torch"})
                faults |= {room(name) for name in names if room(name) == f"{mine}.live"}
            case ["live"]:
                faults = {"engines" for name in names if name.startswith("windtunnel.engines")}
                faults |= {room(name) for name in names if room(name) == f"{mine}.twin"}
            case _:
                continue
        broken |= {(where, name) for name in faults}
    hold(broken, {entry for entry in KNOWN if f"windtunnel.{entry[1]}" not in WORLDS})


def loaded(modules: Iterable[str], heavy: set[str]) -> str:
    """What of ``heavy`` a fresh interpreter has loaded after importing ``modules``."""
    code = f"import {', '.join(modules)}, sys; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_command_line_and_the_package_start_without_heavy_libraries() -> None:
    heavy = {"torch", "numba", "plotly", "sqlalchemy", "ray", "pandas", "networkx", "fastapi", "fsspec"}
    assert loaded(["windtunnel.cli.main"], heavy) == ""
    assert loaded(["windtunnel"], heavy | {"numpy", "typer", "pydantic"}) == ""


def test_what_must_outlive_trainers_needs_no_torch() -> None:
    assert (
        loaded(
            [
                "windtunnel.training.hosts",
                "windtunnel.training.launch",
                "windtunnel.training.elastic.live.supervisor",
                "windtunnel.training.checkpoint.live.memory.service",
            ],
            {"torch"},
        )
        == ""
    )


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {}
    for module, tree in trees().items():
        used = set()
        for name in named(at_import(tree.body)):
            parts = name.split(".")
            used |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        # the packages that a module lies in are being imported already when its own imports run
        graph[module] = {
            other
            for other in used & trees().keys()
            if other != module and not f"{module}.".startswith(f"{other}.")
        }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


# What its users bring themselves: the framework that an adapter is for, the DDP of an all_reduce, a device's
# programs.
BROUGHT = {
    ("training.checkpoint", "accelerate"), ("training.checkpoint", "lightning"),
    ("training.checkpoint", "torchmetrics"), ("training.checkpoint", "transformers"),
    ("network.aggregation", "torch"),
    ("serving.vllm", "torch"), ("serving.vllm", "transformers"),
    ("data.embeddings", "torchrec"), ("data.ingest", "torchrec"), ("trust.gpu", "torch"),
}  # fmt: skip


def test_an_extra_installs_all_that_its_capabilities_import() -> None:
    """Also what the modules of the shared ground import that they use."""
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    optional = {module: tried(content) for module, content in nodes().items()}
    top = {module: set(named(at_import(tree.body))) for module, tree in trees().items()}
    of_module, broken = metadata.packages_distributions(), set()
    for entry in CAPABILITIES:
        verbs = [f"windtunnel.cli.{verb}." for verb in entry.verbs]
        own = {name for name in trees() if f"{name}.".startswith((f"{entry.package}.", *verbs))}
        installed = closure([*project["dependencies"], *project["optional-dependencies"][entry.extra]])
        reached, todo = set[str](), [*own]
        while todo:
            module = todo.pop()
            if module in reached:
                continue
            reached.add(module)
            for used in (imports() if module in own else top)[module] - optional[module]:
                parts = used.split(".")
                if parts[0] == "windtunnel":
                    todo += ({".".join(parts[:length]) for length in range(1, 9)} & trees().keys()) - reached
                elif parts[0] not in sys.stdlib_module_names:
                    brings = {plain(name) for name in of_module.get(parts[0], parts[:1])}
                    broken |= set() if brings & installed else {(entry.name, parts[0])}
    hold(broken, BROUGHT)


def plain(requirement: str) -> str:
    """The name of a distribution in a requirement, as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!\[;~(]", requirement)[0]).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that these bring, where they are installed, and what those need."""
    distributions, todo = set[str](), [plain(requirement) for requirement in requirements]
    while todo:
        name = todo.pop()
        if name not in distributions:
            distributions.add(name)
            try:
                needed = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            todo += [plain(requirement) for requirement in needed if "extra ==" not in requirement]
    return distributions


def tried(content: Iterable[ast.AST]) -> set[str]:
    """What a module can do without: it says so in words, or does it another way."""
    names = set[str]()
    for node in content:
        if isinstance(node, ast.Try):
            caught = "".join(ast.dump(handler.type) for handler in node.handlers if handler.type)
            if "ImportError" in caught or "ModuleNotFoundError" in caught:
                names |= set(named(ast.walk(ast.Module(node.body, []))))
    return names
