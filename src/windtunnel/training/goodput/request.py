"""What a plan is asked for: declared once, for the command line and for Python."""

from dataclasses import dataclass
from pathlib import Path

from windtunnel.base.options import option


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of ``windtunnel plan resilience``: quantities as text with their units. One of ``mtbf`` and
    ``trace`` is needed."""

    cluster: str = option(help="A name of the catalogue such as h100-sxm:128x8, or a file.")
    state_bytes: str = option(
        help="Parameters and optimizer state of the job: 1.1e12, '1.1 TB'.", metavar="BYTES"
    )
    mtbf: str | None = option(None, "Mean time between failures of the job: 3h, 600.", metavar="TIME")
    trace: str | None = option(
        None,
        "Instead of --mtbf: llama3, spot:p3, spot:g4dn (with their published statistics), or a file"
        " of lines 'milliseconds,add|remove,host' or of SkyPilot (.json).",
        metavar="NAME|FILE",
    )
    step_time: str = option("10s", "Of one step, without failures.", metavar="TIME")
    step_overhead: str | None = option(
        None, "Of it, what fewer hosts do not lengthen (optimizer ..); none.", metavar="TIME"
    )
    days: float = option(30.0, "How far to look ahead.", least=0.01, most=3650)
    software: float = option(0.13, "Part of the failures that leaves the host alive.", least=0, most=1)
    leaf_share: float = option(
        0.0, "Part of the host failures that takes a whole leaf switch.", least=0, most=1
    )
    replace: str = option("10min", "Until a lost host is replaced.", metavar="TIME")
    spares: int | None = option(None, "Hosts that wait idle; by default none, compared with one.", least=0)
    detect: str = option("1s", "Until a loss is noticed.", metavar="TIME")
    start: str = option("60s", "For a new process until it can train.", metavar="TIME")
    storage: str = option(
        "20 GB/s", "Bandwidth of the shared storage, for all hosts together.", metavar="RATE"
    )
    storage_share: float = option(1.0, "Part of that bandwidth that saving may take.", least=0.001, most=1)
    storage_within: str = option("1d", "Longest time between two checkpoints to storage.", metavar="TIME")
    save_stall: str | None = option(
        None,
        "What a checkpoint to storage takes from training; the copy within a host by default.",
        metavar="TIME",
    )
    host_memory: str = option("1 TB", "Memory of a host that checkpoints may take.", metavar="BYTES")
    network_share: float = option(
        0.25, "Part of a host's NICs that replication may take.", least=0.001, most=1
    )
    stages: int = option(0, "Hosts of one pipeline; 0: the fewest that hold the state twice.", least=0)
    microbatches: int = option(0, "Of one step; 0: four for every stage of every pipeline.", least=0)
    layers: int = option(96, "Of the model, for pipelines.", least=1, most=1000)
    costs: Path | None = option(  # noqa: RUF009 - a field
        None, 'Measured costs: JSON such as {"detect": 0.03}, in seconds and bytes/s.', metavar="FILE"
    )
    seed: int = option(0, "Of the failures.", least=0)
    script: str = option("train.py", "Of the command that is printed.")
    persist: str = option("checkpoints", "Of the command that is printed: the storage.", metavar="URL")
