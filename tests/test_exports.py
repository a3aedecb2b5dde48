"""What users import is exported by a capability's package, typed, documented, and loaded late."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from windtunnel.capabilities import CAPABILITIES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "windtunnel"
ROOM = re.compile(r"\bwindtunnel(\.\w+){2}\.(live|twin|policy)\b")


def exported(package: str) -> set[str]:
    stub = SOURCE.parent / package.replace(".", "/") / "__init__.pyi"
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("package", [capability.package for capability in CAPABILITIES])
def test_a_package_exports_what_its_stub_names(package: str) -> None:
    module, names = import_module(package), exported(package)
    assert names and set(module.__all__) == names
    # a model's runtime, vLLM, and Flower in an environment of its own, are not always there
    if package not in ("windtunnel.serving.variants", "windtunnel.serving.vllm", "windtunnel.edge.federated"):
        assert all(getattr(module, name) is not None for name in names)


def test_no_page_and_no_example_imports_from_a_room() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    broken = {
        (page.name, line)
        for page in pages
        if page.name != "adding-a-capability.md"
        for line in page.read_text().splitlines()
        if ROOM.search(line) and not line.startswith("::: ")
    }
    assert broken == set()


def test_packages_load_nothing_heavy_before_they_are_used() -> None:
    packages = ", ".join(["windtunnel", *(capability.package for capability in CAPABILITIES)])
    code = f"import sys, {packages}; print(*{{'numpy', 'numba', 'torch', 'simpy'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
