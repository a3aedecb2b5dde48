"""The site is complete and in plain words, builds without a warning, and fetches nothing when it is read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from benchmarks.harness.run import sections_of
from support.pages import (
    GUIDE_LINES,
    OF_CELLS,
    anchors,
    broken_links,
    commands,
    examples,
    problems,
    wrong_words,
)
from windtunnel.capabilities import CAPABILITIES
from windtunnel.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LONG = {"adding-a-capability.md"}  # a whole capability, whose code has a limit of its own
README_LINES = 90
HEADLINES = 6  # rows of results in a guide
WRITTEN = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(hooks: Any) -> Mapping[Path, str]:
    """The text of every page, generated ones too, by its path."""
    written = {path: path.read_text() for path in WRITTEN}
    return written | {DOCS / name: text for name, text in hooks.generated().items()}


def named(entry: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from named(part)


def test_every_page_is_in_the_navigation_once(pages: Mapping[Path, str]) -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    in_navigation = list(named(yaml.safe_load(settings)["nav"]))
    assert sorted(in_navigation) == sorted(str(path.relative_to(DOCS)) for path in pages)
    assert yaml.safe_load(settings)["strict"] is True


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_is_short_and_plain(path: Path) -> None:
    guide = path.parent == DOCS and path.name not in LONG
    assert problems(path.read_text(), GUIDE_LINES if guide else None) == []


def test_generated_pages_are_plain(hooks: Any) -> None:
    """Cells of tables are prose there. The Python API is left out: it has the docstrings of the package."""
    for name, text in hooks.generated().items():
        if not name.startswith("reference/api-"):
            assert problems(text.replace("|", "\n\n"), longest=OF_CELLS) == [], name


def test_the_readme_is_short_and_plain() -> None:
    assert problems((ROOT / "README.md").read_text(), README_LINES) == []


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.name)
def test_a_guide_has_its_parts(capability: Any) -> None:
    """What to run, what comes out and how to read it, when it helps, and its limits."""
    titles = anchors((DOCS / f"{capability.page}.md").read_text())
    assert titles >= {"how-to-read-it", "when-it-helps-and-when-not", "limits"}
    assert titles & {"run-it", "serve"} and titles & {"what-comes-out", "how-well-it-does"}


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_a_guide_has_a_short_table_of_results(path: Path) -> None:
    for section in re.findall(
        r"^## (?:What comes out|How well it does)\n(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S
    ):
        assert len(re.findall(r"^\|", section, re.M)) <= HEADLINES + 2


def test_links_lead_to_a_page_and_a_heading(pages: Mapping[Path, str]) -> None:
    broken = {str(path): broken_links(path, pages) for path in pages}
    assert {path: links for path, links in broken.items() if links} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Short, and plain.", ""),
        ("It runs.\n" * 121, "the page has 121 lines, 120 are accepted"),
        ("a " * 25 + "b.", "a sentence has 26 words, 25 are accepted"),
        (f"- {'a ' * 20}b;\n- {'a ' * 20}b.", ""),
        ("The host is told so.", "'told' is a private word"),
        ("Whoever asks gets it.", "a sentence begins with Whoever"),
        ("Who decides?", ""),
        ("`told` is code.\n\n```\ntold\n```\n\n| told |\n", ""),
        ("The [crew](a.md) grows.", "'crew' is a private word"),
    ],
)
def test_a_bad_page_is_found(text: str, wrong: str) -> None:
    faults = problems(text, 120)
    assert len(faults) == bool(wrong) and all(problem.startswith(wrong) for problem in faults)


def test_a_broken_link_is_found() -> None:
    here, other = DOCS / "here.md", DOCS / "other.md"
    text = "[a](other.md#the-title) [b](other.md#gone) [c](lost.md) [d](#own) [e](https://x.org/#y)\n\n## Own"
    assert broken_links(here, {here: text, other: "# The `title`\n"}) == [
        "other.md#gone leads to no heading", "lost.md leads to no file",
    ]  # fmt: skip


@pytest.mark.parametrize("path", [*WRITTEN, ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_are_commands_and_code_that_there_are(path: Path) -> None:
    """Each call of the command line has its options, each benchmark its name; Python and YAML are read."""
    text, group = path.read_text(), get_command(app)
    wrong = [(words, wrong_words(words, group)) for words in commands(text, "windtunnel")]
    assert [call for call in wrong if call[1]] == []
    for words in commands(text, "python -m benchmarks"):
        if words[0] != "NAME":
            only = {word for flag, word in pairwise(words) if flag == "--only"}
            assert only <= {*sections_of(words[0])}, words
    for code in examples(text, "python"):
        compile(code, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for content in examples(text, "yaml"):
        assert isinstance(yaml.safe_load(content), dict)


def test_examples_import_names_that_there_are(hooks: Any, pages: Mapping[Path, str]) -> None:
    trees = [ast.parse(code) for text in pages.values() for code in examples(text, "python")]
    imports = {
        (node.module, alias.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("windtunnel")
        for alias in node.names
        if "hedge" not in (node.module or "")  # the capability that a page adds
    }
    assert len(imports) > 40
    assert {pair for pair in imports if not there_is(hooks, *pair)} == set()


def there_is(hooks: Any, module: str, name: str) -> bool:
    """Whether ``module`` exports, defines or imports ``name``, by its stub or its source, or holds it."""
    if hooks.is_module(module, name) or (hooks.SOURCE / module.replace(".", "/") / f"{name}.py").exists():
        return True
    stub = hooks.source(module).with_suffix(".pyi")
    text = (stub if stub.exists() else hooks.source(module)).read_text()
    return re.search(rf"\b{name}\b", text) is not None


def test_a_wrong_example_is_found() -> None:
    text = "```\nwindtunnel emulate --cluster a --slwo x train.py --mine\nsudo windtunnel sandbox lss\n```\n"
    mistakes = [wrong_words(words, get_command(app)) for words in commands(text, "windtunnel")]
    assert mistakes == [["--slwo"], ["lss"]]


def test_every_verb_is_listed_with_words_for_each_option(hooks: Any) -> None:
    page = hooks.commands_page()
    for verb in ("emulate", "sandbox fork", "runs compare", "replay", "checkpoint prune"):
        assert f"# windtunnel {verb}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| `-")]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


def test_every_field_has_a_meaning(hooks: Any) -> None:
    rows = [line for page in (hooks.files_page(), hooks.summary_page()) for line in page.splitlines()]
    fields = [row for row in rows if row.startswith("| `")]
    assert len(fields) > 200
    assert [row for row in fields if re.search(r"\|\s*\|$", row)] == []


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the docs extra: make docs")
    pytest.importorskip("material", reason="needs the docs extra: make docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]+|<link[^>]+stylesheet[^>]+//[^>]+',
            page.read_text(),
        )
        assert fetched == [], page
