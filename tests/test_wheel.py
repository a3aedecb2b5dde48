"""``pip install windtunnel`` without this repository: the wheel has all that runs, and runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.conformance, pytest.mark.slow]
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
layer = torch.nn.Linear(64, 64, device=torch.device("cuda", dist.get_rank() % torch.cuda.device_count()))
for _ in range(3):
    layer(torch.ones(4, 64, device=layer.weight.device)).sum().backward()
    dist.all_reduce(layer.weight.grad)
    layer.weight.grad = None
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="needs hatchling to build a wheel")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", folder, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("windtunnel-*.whl")
    return built


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src/windtunnel"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git repository")
    sources = {name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    with zipfile.ZipFile(wheel) as file:
        assert sources - set(file.namelist()) == set()
        modes = {entry.filename: entry.external_attr >> 16 for entry in file.infolist()}
    # the sandboxes' init is a program
    (init,) = (name for name in sources if "/init/init-x86_64-" in name)
    assert modes[init] & 0o111
    for kind in (".so", ".yaml", ".js", ".css", ".json", ".o", ".cpp", ".c", ".h", "py.typed"):
        assert any(name.endswith(kind) for name in sources), kind


def test_it_asks_for_a_range_of_torch_and_pins_none(wheel: Path) -> None:
    """A pin would replace the PyTorch that its user has."""
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    asked = {line.split(";")[0] for line in lines if re.match(r"Requires-Dist: torch\W", line)}
    assert asked == {"Requires-Dist: torch>=2.11"}


def test_it_is_installed_and_emulates(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that sees what windtunnel depends on, but not this repository."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    place = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel],
        check=True,
        capture_output=True,
    )
    # its own packages come first; of those of this interpreter no .pth is read, so not the editable install
    Path(place, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Its kernels are compiled anew, since the sources lie elsewhere: not so well, for so small a job.
    own = {"WINDTUNNEL_HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    environment |= own | {"NUMBA_OPT": "0"}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import windtunnel; print(windtunnel.__file__)").strip()
    assert Path(where).is_relative_to(tmp_path)
    windtunnel = str(tmp_path / "env" / "bin" / "windtunnel")
    assert "emulate" in run(windtunnel, "--help")
    summary = json.loads(run(windtunnel, "emulate", "--json", "--cluster", "h100-sxm:2x2", "train.py"))
    assert summary["iteration_time_s"] > 0
    assert (Path(summary["directory"]) / "report.html").exists()
    decided = json.loads(run(windtunnel, "replay", "last", "--json"))
    assert [part["differences"] for part in decided["capabilities"]] == [[]]
