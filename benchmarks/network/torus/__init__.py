"""What wavelengths of an all-to-all are judged by: ``python -m benchmarks network.torus``.

Plans over shapes beside the bounds, what planning takes, what failures add, and the time of an all-to-all
over lightpaths beside an electrical torus of the same links. The paper has proofs and no measurement:
published figures are its bounds. Wavelengths are counted in plans that the checker passes; traffic is
emulated.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "wavelengths": "plans.wavelength_rows", "planning": "plans.planning_rows",
    "failures": "plans.failure_rows", "alltoall": "traffic.traffic_rows",
}  # fmt: skip

run = runner(__name__, SECTIONS)
