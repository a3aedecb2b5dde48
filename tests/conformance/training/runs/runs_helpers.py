"""Real jobs under injected faults: launch, wait for moments, compare with an undisturbed run, look for what
is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from support.slots import read_header
from support.waiting import until
from windtunnel.linux import network
from windtunnel.training import cleanup
from windtunnel.training.elastic.events import recoveries
from windtunnel.training.launch import Launched, launch

T = TypeVar("T")
TRAINER = Path(__file__).with_name("runs_trainer.py")
STEPS = 12
PATIENCE = 170.0


def of(launched: Launched, kind: str) -> list[dict[str, Any]]:
    return [event for event in launched.events() if event["kind"] == kind]


@contextlib.contextmanager
def running(
    folder: Path, *arguments: Any, script: Path = TRAINER, kind: str = "fsdp", **options: Any
) -> Iterator[Launched]:
    """A job that is launched; afterwards nothing of it is left (property 22)."""
    given = [*map(str, arguments)]
    if script == TRAINER:
        given += ["--kind", kind, "--steps", str(STEPS)]
    settings: dict[str, Any] = {"hosts": 4, "lease": 10.0, "frozen_after": 2.0, **options}
    with (folder / "output").open("wb") as output:
        launched = launch(script, given, folder=folder / "run", output=output.fileno(), **settings)
    try:
        with launched:
            yield launched
    except BaseException:
        print((folder / "output").read_text(errors="replace")[-3000:])
        for event in launched.events()[-40:]:
            print(json.dumps(event)[:400])
        raise
    assert cleanup.marked(launched.token) == []
    assert not launched.memory.exists()
    if launched.network is not None:
        mark = f"wt{launched.token.rpartition('-')[2]}"
        assert mark not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
        assert not list(Path("/run/netns").glob(f"{mark}*"))


def end_well(launched: Launched) -> dict[int, Any]:
    """Wait for the end: what each rank returned."""
    outcome = launched.wait(PATIENCE)
    assert outcome is not None, "it does not end"
    assert outcome.status == 0, outcome
    return outcome.results


def at_gate(launched: Launched, step: int, world: int = 4, after: int = 0) -> int:
    """All ranks of one generation wait before ``step``, with all that was before committed. The generation; a
    later one than ``after``."""

    def there() -> int:
        newest = max((event["generation"] for event in of(launched, "decided")), default=0)
        ranks = [e["rank"] for e in of(launched, "gate") if (e["step"], e["generation"]) == (step, newest)]
        return newest if len(set(ranks)) == world and newest > after else 0

    return until(there)


def open_gate(launched: Launched, step: int) -> None:
    (launched.folder / f"go{step}").touch()


def losses(launched: Launched) -> dict[int, set[str]]:
    by_step: dict[int, set[str]] = {}
    for event in of(launched, "step"):
        by_step.setdefault(event["step"], set()).add(event["loss"])
    return by_step


def same(launched: Launched, reference: dict[str, Any], lost: int = 1) -> list[Any]:
    """It ends bit-identical to ``reference`` (property 11), no step's loss ever differed, and no recovery
    cost more than ``lost`` steps. The recoveries."""
    results = end_well(launched)
    # A step whose checkpoint was complete when rank 0 died before it could tell is not done again.
    assert all([*values] == reference["losses"][str(step)] for step, values in losses(launched).items())
    assert {str(rank): result["digest"] for rank, result in results.items()} == reference["digests"]
    recovered = recoveries(launched.events())
    assert all(recovery.complete for recovery in recovered)
    assert all((recovery.steps_lost or 0) <= lost for recovery in recovered), [
        recovery.steps_lost for recovery in recovered
    ]
    return recovered


def undisturbed(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    """What a job without faults and without checkpoints computes; made once for all workers of pytest."""
    kept = folder / f"run-{kind}.json"
    try:
        os.close(os.open(kept.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        until(kept.exists, timeout=PATIENCE)
        reference: dict[str, Any] = json.loads(kept.read_text())
        return reference
    (folder / kind).mkdir()
    with running(folder / kind, "--bare", kind=kind, **options) as launched:
        results = end_well(launched)
        assert recoveries(launched.events()) == []
        reference = {
            "losses": {step: [*values] for step, values in losses(launched).items()},
            "digests": {rank: result["digest"] for rank, result in results.items()},
            "weights": results[0]["weights"],
        }
    draft = kept.with_suffix(".draft")
    draft.write_text(json.dumps(reference))
    draft.replace(kept)
    return json.loads(kept.read_text())


def slot_files(launched: Launched, place: int, shard: str, step: int) -> list[Path]:
    """Where a host holds that step."""
    folder = Path(launched.places()[place]["memory"])
    return [
        path
        for path in folder.rglob(f"{shard}.*.slot")
        if (header := read_header(path)) is not None and header.complete and header.shard.step == step
    ]


def flip(path: Path) -> None:
    """Turn a bit in the middle of a slot's data."""
    with path.open("r+b") as file:
        file.seek(4096 + (path.stat().st_size - 4096) // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def forge_slots(launched: Launched, place: int, step: int) -> list[Path]:
    """Make the older slot of every shard that a host holds a whole copy of ``step``."""
    from windtunnel.training.checkpoint.live import slot

    oldest: dict[str, tuple[int, Path]] = {}
    for path in Path(launched.places()[place]["memory"]).rglob("*.slot"):
        header = read_header(path)
        assert header is not None
        it = header.shard
        oldest[it.name] = min(oldest.get(it.name, (step, path)), (it.step, path))
    for _, path in oldest.values():
        header, file = read_header(path), slot.SlotFile.open(path)
        assert header is not None
        file.begin(replace(header.shard, step=step))
        file.complete(slot.checksum_of(file.data))
        file.close()
    return [path for _, path in oldest.values()]


def forge_stored(url: str, like: int, step: int) -> None:
    """A whole checkpoint of ``step`` in storage, of the data of ``like``."""
    from windtunnel.training.checkpoint.live import storage

    (real,) = [
        checkpoint for checkpoint in storage.steps(url) if checkpoint.step == like and not checkpoint.bad
    ]
    written, layouts = [], {}
    for shard in real.shards:
        data = memoryview(bytearray(shard.nbytes))
        storage.read_shard(url, shard, data)
        written.append(storage.write_shard(url, replace(shard, step=step), data))
        layouts[shard.layout] = storage.layout(url, shard)
    storage.complete_step(url, written, layouts)


no_network = network.missing()
