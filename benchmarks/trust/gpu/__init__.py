"""Programs on a device that one user owns, by the path of their data, and training on four such devices."""

from benchmarks.harness.rows import runner

SECTIONS = {"paths": "paths.path_rows", "training": "training.training_rows"}
run = runner(__name__, SECTIONS)
