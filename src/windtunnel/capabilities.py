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

    ``name``: its package below ``windtunnel``. ``aim``: what its user wants. ``paper``: the published system
    that it follows, empty where there is none. ``rooms``: which of `ROOMS` it has. ``extra``: what
    ``pip install 'windtunnel[extra]'`` it needs. ``verbs``: its modules in ``cli``. ``page``: its page in
    ``docs``. ``calibrates``: whether ``windtunnel calibrate`` measures something for it. ``twin_of``: the
    capability in whose twin its decisions are priced, where that is not its own. ``worlds_of``: the
    capability whose twin and live act on its policy, where it has none of its own. ``flat``: its live world
    has no folder of its own: it is all of the package that is not another room.
    """

    name: str
    aim: str
    paper: str
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
        "training.emulate", "Fit a training job on a cluster that I do not have", "PrismLLM",
        ROOMS, "train", ("emulate", "sweep"), "emulate", calibrates=True,
    ),
    Capability(
        "training.elastic", "Go on training when hosts fail", "",
        ("policy", "live"), "train", ("train",), "elastic", twin_of="training.goodput",
    ),
    Capability(
        "training.checkpoint", "Lose at most one step when a host dies", "GEMINI",
        ("policy", "live"), "train", ("checkpoint",), "checkpoint", twin_of="training.goodput",
    ),
    Capability(
        "training.pipelines", "Go on with fewer hosts, without a checkpoint", "Oobleck",
        ("policy", "live"), "train", (), "pipelines", twin_of="training.goodput",
    ),
    Capability(
        "training.bottleneck", "Find out whether a faster network would help my job", "NetAI 2020",
        ("policy", "twin"), "train", ("bottleneck",), "bottleneck",
    ),
    Capability(
        "training.goodput", "Plan for the failure rate of my cluster", "",
        ("twin",), "train", ("plan",), "goodput",
    ),
    Capability(
        "training.gradsync", "Compress and fuse gradients where it pays", "Espresso, ZEN",
        ROOMS, "train", ("gradsync",), "gradsync",
    ),
    Capability(
        "serving.engine", "Try a serving policy on my traffic", "",
        ROOMS, "serve", ("serve",), "serving", calibrates=True,
    ),
    Capability(
        "serving.branching", "Decode branches of an answer without late requests", "TAPER",
        ("policy",), "serve", (), "branching", twin_of="serving.engine",
        worlds_of="serving.engine",
    ),
    Capability(
        "serving.prefixcache", "Cache prefixes of hybrid models", "Marconi",
        ("policy",), "serve", (), "prefixcache", worlds_of="serving.engine",
    ),
    Capability(
        "serving.vllm", "Use these policies in my vLLM server", "",
        ("live",), "vllm", (), "vllm", calibrates=True, worlds_of="serving.engine", flat=True,
    ),
    Capability(
        "serving.variants", "Let requests say how accurate and fast an answer must be", "INFaaS",
        ROOMS, "serve", ("variants",), "variants",
    ),
    Capability(
        "agents.sandbox", "Checkpoint, fork and roll back an agent's sandbox", "Crab",
        ROOMS, "agents", ("sandbox",), "sandbox", calibrates=True, flat=True,
    ),
    Capability(
        "network.sharing", "Share one link between tenants", "Augmented Queue",
        ROOMS, "network", ("network",), "sharing",
    ),
    Capability(
        "network.aggregation", "Sum gradients in a switch", "SwitchML, ATP, ESA",
        ROOMS, "network", ("network",), "aggregation",
    ),
    Capability(
        "network.multicast", "Send from one rack to many over passive splitters", "Shufflecast",
        ROOMS, "network", ("network",), "multicast",
    ),
    Capability(
        "network.torus", "Plan an all-to-all in an optical torus", "RWA",
        ("policy", "twin"), "network", ("network",), "torus",
    ),
    Capability(
        "network.dag", "Order computing and sending in one schedule", "MXDAG",
        ROOMS, "network", ("network",), "dag",
    ),
    Capability(
        "network.hostrate", "Keep the queue of a host short", "CERA",
        ROOMS, "network", ("network",), "hostrate",
    ),
    Capability(
        "network.mobilerate", "Send over mobile links with a short queue", "SIRA-H",
        ROOMS, "network", ("network",), "mobilerate",
    ),
    Capability(
        "data.embeddings", "Place embedding tables in fast and slow memory", "RecShard, FlexShard",
        ROOMS, "data", ("embeddings",), "embeddings",
    ),
    Capability(
        "data.ingest", "Feed trainers from workers, every row once", "DPP",
        ROOMS, "data", ("ingest",), "ingest",
    ),
    Capability(
        "data.group", "Change one region on several hosts in one order", "HyperLoop",
        ROOMS, "data", (), "group",
    ),
    Capability(
        "data.files", "Keep files on the disks of several hosts", "LineFS",
        ROOMS, "data", ("files",), "files",
    ),
    Capability(
        "trust.attest", "Give a secret only to a device that proves its program", "ShEF",
        ("policy", "live"), "trust", ("trust",), "attest",
    ),
    Capability(
        "trust.shield", "Store data where the owner of the disk cannot lie", "ShEF",
        ("twin", "live"), "trust", ("trust",), "shield",
    ),
    Capability(
        "control.database", "Ask in SQL why a task waits", "DBOS",
        ROOMS, "control", ("control",), "database",
    ),
    Capability(
        "control.debug", "Replay past requests with changed code", "TROD",
        ("policy", "live"), "control", ("debug",), "debug",
    ),
    Capability(
        "control.node", "Run a learned policy on a host without harm", "SOL",
        ROOMS, "control", ("control",), "node",
    ),
    Capability(
        "silicon.mapper", "Price a training step on a chip that is only a design", "Interstellar",
        ("policy", "twin"), "silicon", ("mapper",), "mapper",
    ),
    Capability(
        "edge.federated", "Spare the server's link in federated learning", "FedP2P",
        ROOMS, "edge", ("federated",), "federated",
    ),
    Capability(
        "trust.gpu", "Know what a protected GPU costs my job", "HIX",
        ROOMS, "trust", (), "gpu",
    ),
)  # fmt: skip


def find(name: str, having: Callable[[Capability], bool] = lambda _: True, *, who: str) -> Capability:
    """The capability called ``name`` among those that ``having`` is true of; ``who`` asks, for the message.

    Raises:
        UserError: there is none.
    """
    accepted = [entry for entry in CAPABILITIES if having(entry)]
    for entry in accepted:
        if entry.name == name:
            return entry
    raise UserError(
        f"{who}: capability {name!r} is unknown; accepted are {', '.join(entry.name for entry in accepted)}"
    )


def markdown() -> str:
    """The README's table of capabilities, by what a user wants."""
    lines = [
        "| I want to | published as | twin | live | command | install | guide |",
        "|---|---|---|---|---|---|---|",
    ]
    for capability in CAPABILITIES:
        worlds = [
            "yes" if room in capability.rooms or capability.worlds_of else "–" for room in ("twin", "live")
        ]
        verbs = ", ".join(f"`{verb}`" for verb in capability.verbs) or "–"
        lines.append(
            f"| {capability.aim} | {capability.paper or '–'} | {' | '.join(worlds)} | {verbs} "
            f"| `windtunnel[{capability.extra}]` | [{capability.page}](docs/{capability.page}.md) |"
        )
    return "\n".join(lines)
