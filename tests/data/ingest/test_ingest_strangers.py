"""Loaders and trainers that nobody here wrote take batches of the service; verbs end with all they started.

One process has all strangers: their imports take longer than what they do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import gone, until
from windtunnel.linux.processes import descendants

pytestmark = [pytest.mark.conformance, pytest.mark.slow]
for name in ("torchdata", "torchrec", "lightning"):
    pytest.importorskip(name, reason="needs the strangers extra")

PROGRAM = """
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")

def main():
    import signal
    from dataclasses import replace
    import torch
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader
    from support.ingest import table, ROWS
    from windtunnel.data.ingest import IngestDataset
    from windtunnel.data.ingest.live.calls import MasterSettings
    from windtunnel.data.ingest.live.serve import started

    folder = Path(sys.argv[1])
    session = replace(table(folder), epochs=9)
    process, address = started(session, folder / "m", MasterSettings(workers=1, every=0.05))
    secret, report = folder / "m" / "secret", {}

    def rows(batches):
        return [row for batch in batches for row in batch["row"].tolist()]

    dataset = IngestDataset(address, secret)
    # forked loaders first: this process has used no Flight yet
    report["loader"] = rows(DataLoader(dataset, batch_size=None, num_workers=2))
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
    batches = iter(loader)
    before = rows(next(batches) for _ in range(30))
    state = json.loads(json.dumps(loader.state_dict(), default=str)) and loader.state_dict()
    del batches
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
    loader.load_state_dict(state)
    report["resumed"] = before + rows(loader)

    # one that the trainer holds itself
    alone = IngestDataset(address, secret)
    report["alone"] = rows(alone)
    batches = iter(alone)
    batch = next(batches)
    report["shares"] = batch["x"].dtype == torch.float32 and not batch["x"].isnan().any().item()
    batches.close()
    rest = rows(alone)
    report["closed"] = batch["row"].tolist() + rest

    keyed = next(iter(IngestDataset(address, secret, keyed="sparse", ordered=True)))["sparse"]
    report["keys"] = keyed.keys(), keyed["ids"].lengths().tolist()[:6]

    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.rows = torch.nn.Linear(1, 1), []
        def training_step(self, batch, index):
            self.rows += batch["row"].tolist()
            return self.layer(batch["x"][:, None]).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(alone, batch_size=None)

    module = Module()
    rest = rows(alone)  # what is left of the epoch above
    lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, accelerator="cpu",
    ).fit(module, Data())
    report["lightning"] = module.rows
    process.send_signal(signal.SIGTERM)
    process.communicate()
    Path(sys.argv[2]).write_text(json.dumps(report))

if __name__ == "__main__":
    main()
"""


def test_loaders_and_trainers(tmp_path: Path) -> None:
    from support.ingest import whole

    program, out = tmp_path / "program.py", tmp_path / "told.json"
    program.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, program, tmp_path, out], env=env, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    for name in ("loader", "resumed", "alone", "closed", "lightning"):
        assert whole(report[name]), name
    assert report["shares"] and report["keys"] == [["ids"], [0, 1, 2, 0, 1, 2]]


DEMO = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "ingest", "demo"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_demo(how: signal.Signals, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*DEMO, "--rows", "16384", "--seconds", "300", "--step", "0.05"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    started = until(lambda: pids if len(pids := descendants(process.pid)) >= 2 else [])
    until(lambda: list(tmp_path.glob("*/ingest/progress.log")))
    process.send_signal(how)
    process.communicate(timeout=60)
    until(lambda: all(gone(pid) for pid in started))
