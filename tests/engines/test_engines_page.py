"""The programs on the engines' page run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "engines.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["flows", "packets"])
def test_a_program_of_the_page_runs(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program, str(PAGE), "exec"), {})
    assert capsys.readouterr().out
