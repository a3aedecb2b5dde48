"""What the inspector says of files: paths and words of changes, and what of them it cannot know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agents.sandbox.inspect.inspect_cell import Cell, files_may_have_changed
from windtunnel.agents.sandbox.inspect import Inspector
from windtunnel.agents.sandbox.model import SandboxPart
from windtunnel.linux.snapshot import read_snapshot

pytestmark = pytest.mark.root


def test_the_paths_and_words_of_changes(cell: Cell, inspector: Inspector) -> None:
    cell.run("mkdir -p old/deep repo; echo 1 > old/a; echo 2 > old/b; echo 3 > old/deep/c; seq 1000 > big")
    cell.watch(inspector)
    cell.run("echo x > new; echo x >> old/a; rm old/b; chmod 700 big; mv old/deep moved; echo y > repo/z")
    effects = inspector.effects(cell.name)
    assert not effects.doubts
    assert {(change.path, change.change) for change in effects.files} == {
        ("/workspace/new", "created"),
        ("/workspace/old/a", "modified"),
        ("/workspace/old/b", "deleted"),
        ("/workspace/big", "metadata"),
        ("/workspace/old/deep", "deleted"),
        ("/workspace/moved", "renamed"),
        ("/workspace/repo/z", "created"),
    }


def test_shared_memory_that_stays_is_a_doubt(cell: Cell, inspector: Inspector) -> None:
    cell.watch(inspector)
    cell.run("echo x > /dev/shm/s")
    (doubt,) = inspector.effects(cell.name).doubts
    assert "/dev/shm/s" in doubt.text and doubt.part is SandboxPart.PROCESSES


def test_a_mapping_from_before_the_snapshot_counts_when_its_process_ran(
    cell: Cell, inspector: Inspector
) -> None:
    cell.run(
        "truncate -s 8192 map; mkfifo go ready; cat > m.py <<'E'\n"
        + MAPPER
        + "E\npython3 m.py & read x < ready"
    )
    cell.settled()
    cell.watch(inspector)
    assert not inspector.effects(cell.name).files, "it sleeps"
    cell.run("echo go > go; read x < ready")
    assert "/workspace/map" in {change.path for change in inspector.effects(cell.name).files}
    cell.settled()
    inspector.rebase(cell.name)
    assert not inspector.effects(cell.name).files


MAPPER = """
import mmap, os
f = open("map", "r+b"); m = mmap.mmap(f.fileno(), 0); f.close()
out = open("ready", "w"); out.write("1\\n"); out.close()
for line in iter(lambda: open("go").readline(), ""):
    m[0] = 1
    out = open("ready", "w"); out.write("1\\n"); out.close()
"""


def test_a_file_opened_before_the_snapshot_and_written_after(cell: Cell, inspector: Inspector) -> None:
    cell.run("exec 9>log")
    cell.watch(inspector)
    cell.run("echo one >&9")
    assert [change.path for change in inspector.effects(cell.name).files] == ["/workspace/log"]
    inspector.rebase(cell.name, read_snapshot(cell.pids()))
    assert not inspector.effects(cell.name).files_total
    cell.run("echo two >&9")
    assert [change.path for change in inspector.effects(cell.name).files] == ["/workspace/log"]


def test_what_the_host_wrote_counts_once_it_is_told(cell: Cell, inspector: Inspector) -> None:
    cell.watch(inspector)
    (cell.root / "workspace" / "put").write_text("x")
    assert not inspector.effects(cell.name).files
    inspector.touched(cell.name, "/workspace/put")
    assert [change.path for change in inspector.effects(cell.name).files] == ["/workspace/put"]


def test_a_storm_in_one_sandbox_puts_only_that_one_in_doubt(
    cells: Callable[[], Cell], inspector: Inspector
) -> None:
    noisy, quiet = cells(), cells()
    noisy.watch(inspector)
    quiet.watch(inspector)
    kernel, many = inspector._kernel, "for i in range(60000): os.truncate('/workspace/file', i)"
    assert kernel is not None
    with kernel._lock:  # the reader is kept from the ring, so it runs over
        noisy.run(f'touch file; python3 -c "import os\n{many}"')
    noisy.run("rm -r /workspace; mkdir /workspace; cd /workspace")
    assert any("events were lost" in doubt.text for doubt in inspector.effects(noisy.name).doubts)
    assert not files_may_have_changed(inspector.effects(quiet.name))
    inspector.rebase(noisy.name, read_snapshot(noisy.pids()))
    assert not files_may_have_changed(inspector.effects(noisy.name))
