"""Pages of the site that are made from the code, the README and CONTRIBUTING: `PAGES` names them.

Sources are read as text, never imported, but for the command line and the tables of capabilities and of
deadlines. The meaning of a field is the docstring beneath it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

FILES = (
    ("Cluster file", "cluster.md", "windtunnel.cluster.schema",
     ("ClusterSpec", "HostSchema", "DeviceSpec", "LinkSpec", "TopologySpec", "MulticastSpec")),
    ("Sweep file", "sweep.md", "windtunnel.training.emulate.sweep.spec", ("SweepSpec",)),
    ("Session of ingestion", "ingest.md", "windtunnel.data.ingest.model", ("IngestSession", "Transform")),
    ("Bandwidth shares", "sharing.md", "windtunnel.network.sharing.spec",
     ("SharingSpec", "TenantShare", "TrafficShare")),
    ("Senders of a host", "hostrate.md", "windtunnel.network.hostrate.spec",
     ("HostrateSpec", "TenantWeight")),
    ("Jobs of tasks", "dag.md", "windtunnel.network.dag.spec",
     ("GraphSpec", "GraphJobSpec", "TaskSpec", "Resource")),
    ("Jobs on one cluster", "scenario.md", "windtunnel.network.scenario.spec",
     ("ScenarioSpec", "ScenarioJobSpec", "TrainingSpec", "MapReduce")),
    ("Parts of a splitter network", "multicast.md", "windtunnel.network.multicast.planning",
     ("OpticalParts", "OpticalPart", "Splitter")),
    ("Accelerator and layers", "mapper.md", "windtunnel.silicon.mapper.spec",
     ("AcceleratorSpec", "LevelSpec", "NetworkSpec", "LayerSchema")),
    ("Settings in vLLM", "vllm.md", "windtunnel.serving.vllm.settings", ("VllmSettings",)),
)  # fmt: skip
"""Files that users write: title, guide, module, and records, the whole file first."""
SUMMARY = (
    ("windtunnel.training.emulate.summary",
     ("Summary", "Command", "ClusterFacts", "RankFacts", "CollectiveFacts", "OperatorFacts", "PeriodFacts",
      "StepFacts", "VerdictFacts", "BaselineFacts", "ReplayFacts", "ConfidentialFacts")),
    ("windtunnel.training.emulate.twin.findings", ("RankWait",)),
    ("windtunnel.training.emulate.twin.memory.profile", ("OutOfMemory", "ScopeBytes")),
    ("windtunnel.training.emulate.summary", ("HybridFacts", "LiveFacts")),
)  # fmt: skip
TYPES = {
    "str": "text", "int": "integer", "float": "number", "bool": "true or false", "None": "null", "Any": "any",
    "Count": "integer from 1", "Bytes": "bytes", "Rate": "bytes/s", "Seconds": "seconds", "Flops": "FLOP/s",
    "Watts": "watts", "Pico": "number from 0", "Amount": "number from 0", "Positive": "number above 0",
    "Price": "number from 0", "Fraction": "share", "AnyLink": "LinkSpec", "Name": "text",
    "Names": "list of text", "Texts": "list of text", "Pair": "two integers", "StrictBool": "true or false",
    "Value": "text or number", "TopologyKind": "the name of a topology", "Category": "text",
}  # fmt: skip
"""Names of types, in words."""
AREAS = ("training", "serving", "agents", "network", "data", "control", "trust", "silicon", "edge")


def on_files(files: Any, config: Any) -> Any:
    """The pages that have no file in ``docs``."""
    from mkdocs.structure.files import File

    for name, content in generated().items():
        files.append(File.generated(config, name, content=content))
    return files


def generated() -> Mapping[str, str]:
    """Every generated page by its path below ``docs``."""
    pages: dict[str, Callable[[], str]] = {
        "index.md": lambda: of_root("README.md"),
        "contributing.md": lambda: of_root("CONTRIBUTING.md"),
        "reference/commands.md": commands_page,
        "reference/api.md": api_page,
        "reference/files.md": files_page,
        "reference/summary.md": summary_page,
        "reference/errors.md": errors_page,
    }
    pages |= {f"reference/api-{area}.md": lambda area=area: area_page(area) for area in AREAS}
    return {name: page() for name, page in pages.items()}


def of_root(name: str) -> str:
    """A page of the repository's root, with its links as they are inside ``docs``."""
    text = (ROOT / name).read_text().replace("](docs/", "](")
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](README.md)", "](index.md)")


# Commands


def commands_page() -> str:
    """Every verb with its arguments and options, from the command line itself."""
    from windtunnel.cli.main import app

    lines = [
        "# Commands and options",
        "",
        "This page shows the text of `windtunnel VERB --help` for every verb."
        " Exit statuses are on the page of [errors](errors.md).",
    ]
    for path, command in verbs("windtunnel", typer.main.get_command(app)):
        lines += ["", f"{'#' * min(len(path.split()), 3)} {path}", "", prose(command.help or "")]
        rows = [
            row(parameter)
            for parameter in command.params
            if not getattr(parameter, "hidden", False) and parameter.name != "help"
        ]
        if rows:
            lines += ["", "| option | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def verbs(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command below ``command``, groups before their members, with the words that call it."""
    for name, member in getattr(command, "commands", {}).items():
        if not member.hidden:
            yield f"{path} {name}", member
            yield from verbs(f"{path} {name}", member)


def prose(text: str) -> str:
    """Help as Markdown: its examples as code."""
    clean = inspect.cleandoc(text.replace("\b", ""))
    return re.sub(r"^Examples?: *(.+)$", r"```\n\1\n```", clean, flags=re.MULTILINE)


def row(parameter: Any) -> str:
    """One argument or option as a line of a table."""
    argument = parameter.param_type_name == "argument"
    words = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = parameter.metavar or parameter.name.upper()
    name = value if argument else words if parameter.is_flag else f"{words} {parameter.metavar or 'VALUE'}"
    default = parameter.default
    shown = "" if default in (None, "", (), [], False) or callable(default) or argument else f"`{default}`"
    return f"| `{cell(name)}` | {shown} | {cell(getattr(parameter, 'help', None) or '')} |"


def cell(text: str) -> str:
    """``text`` inside a table."""
    return text.replace("|", r"\|").replace("\n", " ")


# Records


def source(module: str) -> Path:
    """The file of ``module``."""
    path = SOURCE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def record(module: str, name: str) -> tuple[str, list[tuple[str, str, str, str]]]:
    """The docstring of class ``name`` of ``module``, and its fields: name, type, default and meaning."""
    (cls,) = (
        node
        for node in ast.parse(source(module).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    fields = []
    for node, after in zip(cls.body, [*cls.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            meaning = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            default = "" if node.value is None else ast.unparse(node.value)
            label = re.search(r"alias='(\w+)'", ast.unparse(node.annotation))
            fields.append(
                (
                    label[1] if label else node.target.id,
                    plain(node.annotation),
                    default,
                    " ".join(meaning.split()),
                )
            )
    return ast.get_docstring(cls) or "", fields


def plain(annotation: ast.expr) -> str:
    """A type in words: ``tuple[int, ...]`` is "list of integer"."""
    if isinstance(annotation, ast.Subscript):
        head = ast.unparse(annotation.value)
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if head == "Annotated":
            return plain(inner[0])
        if head == "Literal":
            return ", ".join(f"`{ast.literal_eval(value)}`" for value in inner)
        if head == "dict":
            return f"mapping to {plain(inner[1])}"
        return f"list of {plain(inner[0])}"
    if isinstance(annotation, ast.BinOp):
        return f"{plain(annotation.left)} or {plain(annotation.right)}"
    word = ast.unparse(annotation)
    return TYPES.get(word, word)


def table(module: str, name: str, heading: str) -> list[str]:
    """The section of one record: its docstring and its fields."""
    text, fields = record(module, name)
    lines = ["", heading, "", text.split("\n\n")[0].replace("\n", " "), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field, kind, default, meaning in fields:
        shown = "" if default in ("", "None") or default.endswith(")") else f"`{cell(default)}`"
        lines.append(f"| `{field}` | {cell(kind)} | {shown} | {cell(meaning)} |")
    return lines


def files_page() -> str:
    """The fields of every file that users write, and the deadlines of a training job."""
    from windtunnel.training.elastic.spec import WAITS

    lines = [
        "# Files that you write",
        "",
        "All are YAML. A wrong field ends the command with one sentence and exit status 2.",
    ]
    lines += ["Quantities are numbers in SI units, or text with a unit: `400 Gb/s`, `80 GiB`, `2 us`."]
    for title, guide, module, names in FILES:
        lines += ["", f"## {title}", "", f"Guide: [{guide.removesuffix('.md')}](../{guide})."]
        for name in names:
            lines += table(module, name, f"### {title}: {name}")
    lines += [
        "",
        "## Deadlines of a training job",
        "",
        "`windtunnel train --deadlines FILE` takes a name and seconds in each line.",
    ]
    lines += ["", "| name | of | seconds | waits for |", "|---|---|---|---|"]
    lines += [f"| `{wait.name}` | {wait.who} | {wait.default:g} | {cell(wait.what)} |" for wait in WAITS]
    return "\n".join(lines) + "\n"


def summary_page() -> str:
    """The fields of ``summary.json``."""
    lines = [
        "# `summary.json`: the result of an emulation",
        "",
        "Every run of `windtunnel emulate` writes this JSON object into its folder. `--json` prints it,",
        "and the store holds it (`windtunnel runs show RUN_ID --json`).",
        "",
        "The form `windtunnel.emulate/2` is stable: fields are only added. A field that changes its meaning",
        "or goes away makes it `/3`. In `/1` sets of ranks were lists of numbers; such runs are still read.",
        "",
        "Units are SI, shares are from 0 to 1, and an unknown figure is `null`.",
        'A set of ranks is text: `"0-503,510"`.',
        "Figures without another statement are of the steady iteration, or of the mean one of the period.",
        "",
        "```sh",
        "windtunnel emulate --json --cluster h100-sxm:16x8 train.py > run.json",
        "jq '.iteration_time_s, .mfu, (.ranks[] | {name, peak_reserved_bytes, fits})' run.json",
        "```",
    ]
    for module, names in SUMMARY:
        for name in names:
            lines += table(module, name, f"## {name}")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Every family of errors, and what ends a command with which status."""
    lines = [
        "# Errors and exit statuses",
        "",
        "A command ends with one of these statuses, and Python raises the class beside it.",
    ]
    lines += [
        "An error is one sentence. It names a parameter between backticks, the command line names a flag."
    ]
    lines += ["", "| status | class | meaning |", "|---:|---|---|", "| 0 | | done |"]
    tree = ast.parse(source("windtunnel.base.errors").read_text())
    status: dict[str, int] = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        own = [node.value for node in cls.body if isinstance(node, ast.Assign)]
        status[cls.name] = ast.literal_eval(own[0]) if own else status.get(ast.unparse(cls.bases[0]), 1)
        text = (ast.get_docstring(cls) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| {status[cls.name]} | `wt.{cls.name}` | {cell(text)} |")
    lines += ["| 130 | | interrupted |", "", "::: windtunnel.base.errors"]
    return "\n".join(lines) + "\n"


# Python


def exports(package: str) -> dict[str, str]:
    """What ``package`` exports: each name with the module that defines it, from its stub."""
    stub = SOURCE / package.replace(".", "/") / "__init__.pyi"
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            origin = ".".join([package, *([node.module] if node.module else [])])
            found |= {alias.name: origin for alias in node.names}
    return found


def api_page() -> str:
    """What ``import windtunnel as wt`` has, and where the capabilities' names are."""
    from windtunnel.capabilities import CAPABILITIES

    lines = [
        "# Python API",
        "",
        "```python",
        "import windtunnel as wt",
        "",
        'run = wt.emulate("train.py", "--size", "8b", cluster="h100-sxm:16x8")',
        "print(run.summary.iteration_time_s, run.summary.peak_reserved_bytes, run.summary.critical_path)",
        "```",
        "",
        "Importing `windtunnel` loads nothing heavy: a name is loaded when it is first used.",
        "Every capability's package exports the names below. Its rooms (`policy`, `twin`, `live`) may move.",
        "The policy of a package is `Observation`, `Decision`, `decide(observation)` and `POLICIES`.",
        "",
        "| package | names | reference |",
        "|---|---|---|",
    ]
    for capability in CAPABILITIES:
        names = ", ".join(f"`{name}`" for name in sorted(exports(capability.package)))
        area = capability.name.split(".")[0]
        lines.append(
            f"| `{capability.package}` | {names} | [{area}](api-{area}.md#{anchor(capability.package)}) |"
        )
    lines += ["", "## windtunnel", ""]
    for name, origin in exports("windtunnel").items():
        if not origin.startswith("windtunnel.base.errors") and not is_module(origin, name):
            lines += entry(name, definition(origin, name), 3)
    return "\n".join(lines) + "\n"


def area_page(area: str) -> str:
    """The Python API of the capabilities of one area."""
    from windtunnel.capabilities import CAPABILITIES

    lines = [f"# Python API: {area}"]
    for capability in CAPABILITIES:
        if capability.name.startswith(f"{area}."):
            lines += [
                "",
                f"## {capability.package}",
                "",
                f"Guide: [{capability.page}](../{capability.page}.md).",
                "",
            ]
            for name, origin in exports(capability.package).items():
                lines += entry(name, definition(origin, name), 3)
    return "\n".join(lines) + "\n"


def anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title).lower()


def is_module(package: str, name: str) -> bool:
    return (SOURCE / package.replace(".", "/") / name).is_dir()


def definition(module: str, name: str) -> str | None:
    """The module that defines ``name``, which ``module`` may only pass on; None where it is a plain value."""
    stub = source(module).with_suffix(".pyi")
    for node in ast.parse((stub if stub.exists() else source(module)).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            base = module if source(module).name == "__init__.py" else module.rpartition(".")[0]
            origin = node.module or ""
            return definition(origin if node.level == 0 else f"{base}.{origin}", name)
    return None


def entry(name: str, module: str | None, level: int) -> list[str]:
    """One exported name for mkdocstrings; a plain value is in the table of names alone."""
    if module is None or not module.startswith("windtunnel"):
        return []
    return [f"::: {module}.{name}", "    options:", f"      heading_level: {level}", ""]


if __name__ == "__main__":
    for page, text in generated().items():
        print(f"{page}: {len(text.splitlines())} lines")
