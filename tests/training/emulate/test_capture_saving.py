"""A script's rotation takes no checkpoint that was there before, and is not stopped by one never written."""

from __future__ import annotations

from pathlib import Path

from capturing import session

SCRIPT = """
import os, shutil, sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

folder = Path(sys.argv[1])
weight = torch.nn.Parameter(torch.ones(4, 4, device="cuda"))
optimizer = torch.optim.AdamW([weight])
assert (folder / "step-100.pt").exists() and (folder / "old" / "weights.distcp").exists()
saved = []
for step in range(10):
    (weight.sum() * 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    # By way of a temporary name, over a real one; rotation by the names that were saved.
    torch.save({"weight": weight}, folder / "latest.tmp")
    os.replace(folder / "latest.tmp", folder / "latest.pt")
    torch.save({"weight": weight}, str(folder / f"step-{step}.pt"))
    os.rename(folder / f"step-{step}.pt", folder / f"kept-{step}.pt")
    dcp.async_save({"weight": weight}, checkpoint_id=folder / f"shards-{step}").result()
    saved.append((folder / f"kept-{step}.pt", folder / f"shards-{step}"))
    if len(saved) > 1:
        file, shards = saved.pop(0)
        os.remove(file)
        shutil.rmtree(shards)
        for again in (lambda: file.unlink(), lambda: shutil.rmtree(shards)):
            try:
                again()
            except FileNotFoundError:
                continue
            raise AssertionError("it was removed already")
    # In every step: the capture ends within the loop.
    # Real ones, that nothing takes the place of.
    (folder / "step-100.pt").unlink()
    os.rename(folder / "latest.pt", folder / "previous.pt")
    shutil.rmtree(folder / "old", ignore_errors=True)
    (folder / "old" / "weights.distcp").unlink()
    (folder / "old").rmdir()
    # What is no checkpoint, and what this run has written itself.
    (folder / "log.txt").unlink()
    torch.save({"step": 3}, folder / "small.pt")
    (folder / "small.pt").rename(folder / "moved.pt")
    assert torch.load(folder / "moved.pt") == {"step": 3} and not (folder / "small.pt").exists()
    (folder / "moved.pt").unlink()
    (folder / "new").mkdir()
    torch.save({"step": 3}, folder / "new" / "small.pt")
    shutil.rmtree(folder / "new")
    assert not (folder / "new").exists()
    (folder / "log.txt").write_text("for the next rank")
    # A copy of the best one, by path and into a folder; the newest by a link. Real ones stay as they are.
    torch.save({"weight": weight}, folder / "last.pth.tar")
    for best in (folder / "best.pth.tar", folder / "old"):
        shutil.copy2(folder / "last.pth.tar", best)
    shutil.copyfile(folder / "best.pth.tar", folder / "better.pth.tar")
    assert not (folder / "old" / "last.pth.tar").exists() and not (folder / "better.pth.tar").exists()
    os.symlink("last.pth.tar", folder / "newest.pt")
    shutil.copy(folder / "log.txt", folder / "copied.txt")
    (folder / "copied.txt").unlink()
    # What has values does not take the place of a real one either, however it is written.
    with open(folder / "step-100.pt", "wb") as file:
        torch.save({"weight": weight}, file)
    torch.save({"step": 3}, folder / "step-100.pt")
    with open(folder / "first.tmp", "wb") as file:
        torch.save({"weight": weight}, file)
    os.replace(folder / "first.tmp", folder / "step-100.pt")
    (folder / "first.tmp").unlink()
    # Data that is mapped as NumPy does where nothing is said, to read and to write.
    assert bytes(np.memmap(folder / "tokens.bin", np.uint8)[:7]) == b"weights"
    # A script that goes on from the newest folder that it finds.
    if step == 0:
        assert not (folder / "runs").exists(), "a folder of the rank before"
    os.makedirs(folder / "runs" / str(step))
    torch.save({"weight": weight}, folder / "runs" / str(step) / "weights.pt")
"""


def test_real_checkpoints_stay_and_rotation_comes_through(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "old").mkdir(parents=True)
    names = ("step-100.pt", "latest.pt", "old/weights.distcp", "best.pth.tar", "tokens.bin")
    real = {name: f"weights in {name}" for name in names}
    for name, content in (real | {"log.txt": "of the run before"}).items():
        (folder / name).write_text(content)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with session(str(script), str(folder)) as capture_session:
        slices = capture_session.capture([0, 1])  # the second finds what the first found
    left = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert left == real | {"log.txt": "for the next rank"}
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["old"]
    for slice_ in slices:
        assert sum("was there before the emulation" in note.text for note in slice_.notes) == 1
