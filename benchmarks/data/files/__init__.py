"""What files that outlive their host are judged by: ``python -m benchmarks data.files``.

Three hosts on this computer, of which those of each mode run in turn; a frozen host; and the twin, told what
the stages cost here. Published figures are LineFS's (Kim et al., SOSP 2021), on other hardware."""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "write": "modes.write_rows",
    "cpu": "modes.cpu_rows",
    "frozen": "modes.frozen_rows",
    "peer": "peer.peer_rows",
}

run = runner(__name__, SECTIONS)
