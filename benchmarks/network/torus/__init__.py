"""The paper has proofs and no measurement: published figures are its bounds. Wavelengths are counted in
plans that the checker passes; traffic is emulated."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "wavelengths": "plans.wavelength_rows", "planning": "plans.planning_rows",
    "failures": "plans.failure_rows", "alltoall": "traffic.traffic_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
