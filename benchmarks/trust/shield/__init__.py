"""What a shield and an attestation cost here, and a shield an accelerator."""

from benchmarks.harness.rows import runner

PARTS = ("memory", "handshake", "accelerators")
run = runner(__name__, {part: f"cost.{part}_rows" for part in PARTS})
