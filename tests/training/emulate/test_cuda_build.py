"""With a CUDA build of PyTorch the driver of a host that has one is not asked; only such a build shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from capturing import SCRIPTS

from windtunnel.training.emulate.live import native_library

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.slow,
    pytest.mark.skipif(
        not native_library.is_cuda_build(), reason="needs a CUDA build of PyTorch: make matrix"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static int met(const char* what) {
  FILE* f = fopen(getenv("MET"), "a");
  fprintf(f, "%s\\n", what);
  return fclose(f) + 100;
}
int cuInit(unsigned flags) { return met("cuInit"); }
int cuDriverGetVersion(int* version) { *version = 14000; met("cuDriverGetVersion"); return 0; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, int* status) {
  met(name); *found = (void*)cuInit; return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA driver that libraries find and load, and that writes what it is asked into the file returned."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = str(tmp_path / "libcuda.so.1")
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        library,
        str(tmp_path / "driver.c"),
    ]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("MET", str(tmp_path / "met"))
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    return tmp_path / "met"


def test_an_emulation_asks_the_driver_for_nothing(driver: Path) -> None:
    windtunnel = str(Path(sys.executable).with_name("windtunnel"))
    # The profiler's own library counts the devices; of those CUDA_VISIBLE_DEVICES leaves it none.
    cases = re.findall(r"^def (case_\w+)", (SCRIPTS / "device.py").read_text(), re.MULTILINE)
    cases.remove("case_profilers")
    for program in (["tiny.py"], ["device.py", *cases]):
        command = [
            windtunnel,
            "emulate",
            "--json",
            "--no-report",
            "--ranks",
            "0",
            "--cluster",
            "h100-sxm:1x8",
        ]
        done = subprocess.run(
            [*command, str(SCRIPTS / program[0]), *program[1:]], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout)["iteration_time_s"] > 0
        assert not driver.exists(), driver.read_text()


def test_the_driver_of_this_test_is_one_that_pytorch_finds(driver: Path) -> None:
    asking = [sys.executable, "-c", "import torch; torch.cuda.is_available()"]
    subprocess.run(asking, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    assert "cuInit" in driver.read_text()
