"""The site names what there is, builds without a warning, and fetches nothing when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation(hooks: Any) -> None:
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= named
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["strict"] is True
    for name in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", hooks.of_root(name))
        assert {link for link in links if link.endswith(".md")} <= named


def test_every_verb_is_listed_with_words_for_each_option(hooks: Any) -> None:
    page = hooks.commands_page()
    for verb in ("emulate", "sandbox fork", "runs compare", "replay", "checkpoint prune"):
        assert f"# windtunnel {verb}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| `-")]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


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
