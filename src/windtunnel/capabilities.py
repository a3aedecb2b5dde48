"""The table of capabilities: what there is, where it stands, and how a user reaches it.

The command line, ``calibrate``, ``replay``, the README and the architecture test read it. A
capability is a folder below ``windtunnel`` with some of the three rooms, and one line here. This module loads
none of them: that is done by name when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from windtunnel.base.errors import UserError

ROOMS = ("policy", "twin", "live")


@dataclass(frozen=True, slots=True)
class Capability:
    """One line of the table.

    ``name``: its package below ``windtunnel``. ``rooms``: which of `ROOMS` it has. ``extra``: what
    ``pip install 'windtunnel[extra]'`` it needs. ``verbs``: its modules in ``cli``. ``page``: its page in
    ``docs``. ``calibrates``: whether ``windtunnel calibrate`` measures something for it. ``twin_of``: the
    capability in whose twin its decisions are priced, where that is not its own. ``worlds_of``: the
    capability whose twin and live act on its policy, where it has none of its own. ``flat``: its live world
    has no folder of its own: it is all of the package that is not another room.
    """

    name: str
    title: str
    rooms: tuple[str, ...]
    extra: str
    verbs: tuple[str, ...]
    page: str
    calibrates: bool = False
    twin_of: str = ""
    worlds_of: str = ""
    flat: bool = False

    @property
    def package(self) -> str:
        return f"windtunnel.{self.name}"

    @property
    def pricing(self) -> str | None:
        """The module with its ``cost(observation, decision)``, if any has it."""
        if self.twin_of:
            return f"windtunnel.{self.twin_of}.twin"
        return f"{self.package}.twin" if "twin" in self.rooms else None

    def room(self, name: str) -> ModuleType:
        """The room of that name, imported.

        Raises:
            UserError: it has none.
        """
        if name not in self.rooms:
            raise UserError(f"{self.name} has no {name}; it has {', '.join(self.rooms)}")
        return import_module(self.package if self.flat and name == "live" else f"{self.package}.{name}")


CAPABILITIES = (
    Capability(
        "training.emulate", "A training script on a cluster that is not there",
        ROOMS, "train", ("emulate", "sweep"), "emulate", calibrates=True,
    ),
    Capability(
        "training.elastic", "A training job that goes on when hosts fail",
        ("policy", "live"), "train", ("train",), "elastic", twin_of="training.goodput",
    ),
    Capability(
        "training.checkpoint", "Checkpoints of every step in the memory of other hosts (GEMINI)",
        ("policy", "live"), "train", ("checkpoint",), "elastic", twin_of="training.goodput",
    ),
    Capability(
        "training.pipelines", "Pipelines that go on with the hosts that are left (Oobleck)",
        ("policy", "live"), "train", (), "elastic", twin_of="training.goodput",
    ),
    Capability(
        "training.bottleneck", "Whether the network holds a training job up (NetAI 2020)",
        ("policy", "twin"), "train", ("bottleneck",), "bottleneck",
    ),
    Capability(
        "training.goodput", "How much work months of failures leave, for each way to go on",
        ("twin",), "train", ("plan",), "elastic",
    ),
    Capability(
        "training.gradsync", "Gradients compressed, fused and summed where that pays (Espresso, ZEN)",
        ROOMS, "train", ("gradsync",), "gradsync",
    ),
    Capability(
        "serving.engine", "A language model served over HTTP, batched step by step by a policy",
        ROOMS, "serve", ("serve",), "serving", calibrates=True,
    ),
    Capability(
        "serving.branching", "Branches of an answer side by side, as far as nobody gets late (TAPER-style)",
        ("policy",), "serve", (), "serving", twin_of="serving.engine",
        worlds_of="serving.engine",
    ),
    Capability(
        "serving.prefixcache", "What hybrid models keep of prompts they have read (Marconi)",
        ("policy",), "serve", (), "serving", worlds_of="serving.engine",
    ),
    Capability(
        "serving.vllm", "The engine's policies in the scheduler of a vLLM server",
        ("live",), "vllm", (), "vllm", calibrates=True, worlds_of="serving.engine", flat=True,
    ),
    Capability(
        "serving.variants", "Requests say what they need, and variants of models answer (INFaaS)",
        ROOMS, "serve", ("variants",), "serving",
    ),
    Capability(
        "agents.sandbox", "Agents' sandboxes that are kept, restored, forked and rolled back (Crab)",
        ROOMS, "agents", ("sandbox",), "sandbox", calibrates=True, flat=True,
    ),
    Capability(
        "network.sharing", "Bandwidth shares on one queue, whoever sends how (Augmented Queue)",
        ROOMS, "network", ("network",), "network",
    ),
    Capability(
        "network.aggregation", "Gradients summed by a switch that jobs share (SwitchML, ATP, ESA)",
        ROOMS, "network", ("network",), "network",
    ),
    Capability(
        "network.multicast", "From one rack to many over passive splitters, relayed by racks (Shufflecast)",
        ROOMS, "network", ("network",), "network",
    ),
    Capability(
        "network.torus", "An all-to-all in an optical torus: wavelengths, routes, failures (RWA)",
        ("policy", "twin"), "network", ("network",), "network",
    ),
    Capability(
        "network.dag", "Computing and sending in one order, within jobs and between them (MXDAG)",
        ROOMS, "network", ("network",), "network",
    ),
    Capability(
        "network.hostrate", "A host's own queue kept short by windows for its senders (CERA)",
        ROOMS, "network", ("network",), "network",
    ),
    Capability(
        "network.mobilerate", "Sending over mobile links at their rate, with a short queue (SIRA-H)",
        ROOMS, "network", ("network",), "mobilerate",
    ),
    Capability(
        "data.embeddings", "Embedding tables over fast and slow memory of many devices (RecShard, FlexShard)",
        ROOMS, "data", ("embeddings",), "embeddings",
    ),
    Capability(
        "data.ingest", "Samples read, transformed and batched by workers beside trainers (DPP)",
        ROOMS, "data", ("ingest",), "ingest",
    ),
    Capability(
        "data.group", "One region on several hosts, changed on all by engines of their own (HyperLoop)",
        ROOMS, "data", (), "files",
    ),
    Capability(
        "data.files", "Files on the disks of several hosts, of which some may fail (LineFS)",
        ROOMS, "data", ("files",), "files",
    ),
    Capability(
        "trust.attest", "A device proves what it runs before it gets a secret (ShEF)",
        ("policy", "live"), "trust", ("trust",), "trust",
    ),
    Capability(
        "trust.shield", "Memory and storage that hold ciphertext, and nothing old unnoticed (ShEF)",
        ("twin", "live"), "trust", ("trust",), "trust",
    ),
    Capability(
        "control.database", "A cluster's state as tables: scheduling, messages, files, monitoring (DBOS)",
        ROOMS, "control", ("control",), "control",
    ),
    Capability(
        "control.debug", "Past requests replayed, and tried anew with changed code (TROD)",
        ("policy", "live"), "control", ("debug",), "control",
    ),
    Capability(
        "control.node", "Agents that learn on a host, and cannot hurt it (SOL)",
        ROOMS, "control", ("control",), "control",
    ),
    Capability(
        "silicon.mapper", "What layers and training steps cost on a chip that is a drawing (Interstellar)",
        ("policy", "twin"), "silicon", ("mapper",), "mapper",
    ),
    Capability(
        "edge.federated", "Federated learning whose groups of devices spare the server's link (FedP2P)",
        ROOMS, "edge", ("federated",), "federated",
    ),
    Capability(
        "trust.gpu", "A GPU that belongs to one user at a time, and what that costs a job (HIX)",
        ROOMS, "trust", (), "trust",
    ),
)  # fmt: skip


def find(name: str, having: Callable[[Capability], bool] = lambda _: True, *, who: str) -> Capability:
    """The capability called ``name`` among those that ``having`` is true of; ``who`` asks, for the message.

    Raises:
        UserError: there is none.
    """
    accepted = [one for one in CAPABILITIES if having(one)]
    for one in accepted:
        if one.name == name:
            return one
    raise UserError(
        f"{who}: capability {name!r} is unknown; accepted are {', '.join(one.name for one in accepted)}"
    )


def markdown() -> str:
    """The README's table of capabilities."""
    lines = [
        "| capability | twin | live | command | install | page |",
        "|---|---|---|---|---|---|",
    ]
    for one in CAPABILITIES:
        marks = ["yes" if room in one.rooms or one.worlds_of else "–" for room in ("twin", "live")]
        verbs = ", ".join(f"`{verb}`" for verb in one.verbs) or "–"
        lines.append(
            f"| {one.title} (`{one.name}`) | {' | '.join(marks)} | {verbs} | `windtunnel[{one.extra}]` "
            f"| [{one.page}](docs/{one.page}.md) |"
        )
    return "\n".join(lines)
