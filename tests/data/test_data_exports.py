"""What users import of embeddings and ingest is exported by the packages; no page or example goes behind."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("windtunnel.data.embeddings", "windtunnel.data.ingest")


@pytest.mark.parametrize("name", PACKAGES)
def test_all_names_are_there_typed_and_on_the_page(name: str) -> None:
    package = import_module(name)
    tree = ast.parse(Path(package.__file__ or "").read_text())
    [block] = [one for one in tree.body if isinstance(one, ast.If)]
    typed = {alias.name for one in block.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    assert typed == set(package.__all__)
    page = (ROOT / "docs/api.md").read_text()
    for each in package.__all__:
        found = getattr(package, each)
        assert found.__doc__ and found.__module__.startswith(name)
        assert re.search(
            rf"::: {found.__module__}(\.{each}\n|\n(    .*\n)*.*members: \[.*\b{each}\b)", page
        ), each
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


def test_packages_cost_nothing_before_they_are_used() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; raise SystemExit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_page_and_no_example_imports_from_a_room() -> None:
    rooms = re.compile(r"windtunnel\.data\.(embeddings|ingest)\.(live|twin|policy)\b")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*")]
    broken = {
        (path.name, line)
        for path in pages
        if path.suffix in (".md", ".py", ".ipynb")
        for line in path.read_text().splitlines()
        if rooms.search(line) and not line.startswith("::: ")
    }
    assert broken == set()
