"""The unit that systemd is given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.agents.sandbox.daemon.server import unit
from windtunnel.cli.main import app


def test_the_unit_is_one(tmp_path: Path) -> None:
    home = str(tmp_path / "a home")
    printed = CliRunner().invoke(app, ["sandbox", "--home", home, "serve", "--print-unit", "--http", "8080"])
    assert printed.exit_code == 0, printed.output
    assert printed.output == unit(Path(home), (), ["--http", "8080"])
    assert f'"sandbox" "--home" "{home}" "serve" "--http" "8080"\n' in printed.output
    assert not Path(home).exists()
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    file = tmp_path / "windtunnel-sandbox.service"
    file.write_text(printed.output)
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60
    )
    assert [line for line in checked.stderr.splitlines() if file.name in line] == []
