"""A million writes; and a real training job whose storage is brought back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.trust import nonces
from trust.shield.test_shield_memory import rewritten

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("mode", ["versions", "tree"])
def test_no_nonce_comes_twice_in_a_million_writes(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = nonces(monkeypatch)
    rewritten(mode, tmp_path, 1_000_000)
    assert len(set(used)) == len(used) >= 1_000_000


def windtunnel(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"WINDTUNNEL_HOME": str(folder / "home"), "WINDTUNNEL_SHIELD_STATE": str(folder / "state")}
    environment = {**os.environ, **places}
    command = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_a_training_job_writes_to_a_shield_and_another_storage_is_found_out(tmp_path: Path) -> None:
    """What was removed does not come back with the storage of before, and no byte may be another one."""
    storage, url = tmp_path / "storage", f"shield::file://{tmp_path}/storage"
    job = ("examples/train_llama.py", "--size", "debug", "--steps", "10")
    trained = windtunnel(tmp_path, "train", "--hosts", "2", "--persist", url, "--persist-every", "5", *job)
    assert trained.returncode == 0, trained.stderr
    shutil.copytree(storage, tmp_path / "old")
    pruned = windtunnel(tmp_path, "checkpoint", "prune", "--keep", "1", url)
    assert pruned.returncode == 0, pruned.stderr
    shutil.rmtree(storage)
    shutil.move(tmp_path / "old", storage)
    verified = windtunnel(tmp_path, "checkpoint", "verify", url)
    assert verified.returncode == 0, verified.stderr
    assert "step 9" in verified.stdout and "step 4" not in verified.stdout
    for path in storage.rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    refused = windtunnel(tmp_path, "checkpoint", "verify", url)
    assert refused.returncode in (1, 2), refused.stdout
    assert "Traceback" not in refused.stderr
