"""What is launched: a script, its hosts, what is done at a loss; declared once.

The command line is made from the fields that are options (`windtunnel.base.options`). Launcher, supervisor,
agents and trainers are configured by the same object; what only some of them need is made from it here.
"""

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from windtunnel.base.errors import UserError
from windtunnel.base.options import option, options
from windtunnel.base.plain import from_plain
from windtunnel.base.tls import Certificates
from windtunnel.linux.hosts import ENGINES, KUBERNETES, is_engine
from windtunnel.training.checkpoint.policy.placement import place
from windtunnel.training.checkpoint.settings import CheckpointSettings, MemoryLimits
from windtunnel.training.checkpoint.settings import CheckpointSettings as Checkpoints
from windtunnel.training.elastic.faults import parse
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.elastic.policy.state import Deadlines, SupervisorSettings

# What a trainer will import anyway: ways to lay out a model, torch._dynamo with the first optimizer of a
# process, SciPy where pipelines are laid out anew after a loss.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch._dynamo",
    "scipy.optimize",
    "windtunnel.training.preload",
)
_PATHS = ("script", "cwd", "secret_file")
_OF_CHECKPOINTS = (
    *("placement", "mode", "every"),
    *("persist", "persist_every", "keep", "on_no_checkpoint"),
)


Who = Literal["supervisor", "agent", "trainer", "memory", "checkpoint"]
LONGEST = 1e7


@dataclass(frozen=True)
class WaitBound:
    """One deadline: whose it is, its ``default`` in seconds, and for ``what`` is waited."""

    name: str
    who: Who
    default: float
    what: str


WAITS = (
    *(
        WaitBound(each.name, "supervisor", getattr(Deadlines, each.name), each.metadata["what"])
        for each in fields(Deadlines)
    ),
    WaitBound("stuck", "agent", 10.0, "a sign of life of a process that is not stopped"),
    WaitBound("leave", "agent", 5.0, "the trainers to end when the job is finished"),
    WaitBound("operation", "trainer", 60.0, "an operation of the group, an agreement (else `--timeout`)"),
    WaitBound("generation", "trainer", 3600.0, "the generation after a loss"),
    WaitBound("cut", "trainer", 2.0, "a program to move after its group was cut"),
    WaitBound("finish", "trainer", 86400.0, "ranks that are still at work, when one has finished"),
    WaitBound("connect", "memory", MemoryLimits.connect, "a peer's memory service to answer"),
    WaitBound("silence", "memory", MemoryLimits.silence, "a byte on a connection between memory services"),
    WaitBound("membership", "memory", MemoryLimits.membership, "word of the generation that a request is of"),
    WaitBound("slot", "memory", MemoryLimits.slot, "a slot at the holder of a copy"),
    WaitBound(
        "commit", "checkpoint", CheckpointSettings.patience, "a commit, before a checkpoint is left out"
    ),
    WaitBound(
        "stored", "checkpoint", CheckpointSettings.stored, "what is being written to storage, at the end"
    ),
    WaitBound("load", "checkpoint", CheckpointSettings.load, "ranks that load longer than others"),
)
NAMES = {wait.name: wait for wait in WAITS}


def read(path: Path) -> dict[str, float]:
    """The deadlines that a file names, in seconds: YAML, a name and seconds in each line. Others keep their
    default.

    Raises:
        UserError: a name that is not known, or a value that is no time.
    """
    from windtunnel.base.strict_yaml import read_yaml

    content: Any = read_yaml(path, "file of deadlines", f"one with seconds for any of {', '.join(NAMES)}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: accepted are lines of a name and seconds, such as 'hosts: 120'")
    for name, value in content.items():
        if name not in NAMES:
            raise UserError(f"{path}: there is no deadline {name!r}; known are {', '.join(NAMES)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 < value <= LONGEST:
            raise UserError(f"{path}: {name} is {value!r}; a number of seconds above 0 is accepted")
    return {name: float(value) for name, value in content.items()}


@dataclass(frozen=True)
class JobSpec:
    """What is launched; see the options' own words for them.

    ``domains``: the failure domain of each host, or the text of the option. ``rate``: bytes/s. ``preload``:
    modules; a text adds to the usual ones. ``deadlines``: seconds by name (`WAITS`), or the file.
    ``listen``: where hosts that are not ours ask for the job; then none are emulated, nor with ``on``.
    ``frozen_after``: seconds until a worker that is stopped is given up, the lease unless given.
    ``secret_file``: with the secret that the job's processes share; None: that of the environment
    (`base.keys`), or a new one. ``tls``: the files of the certificates with which connections are encrypted
    (`tls.OPTIONS`).
    """

    script: Path = Path()
    arguments: tuple[str, ...] = ()
    hosts: int = option(1, "Number of hosts, emulated on this machine.", least=1)
    on: str = option("", f"Run on hosts of an engine: {ENGINES}.", metavar="ENGINE")
    image: str = option("", "With --on kubernetes: the image of the containers.", metavar="IMAGE")
    per_host: int = option(1, "Ranks on each host.", least=1)
    spares: int = option(0, "Spare hosts for losses.", least=0)
    on_loss: str = option(
        Rules.on_loss, "What to do after a loss: replace the host, shrink the job, or restart all processes.",
        among=("replace", "shrink", "restart", "shrink-restart"),
    )  # fmt: skip
    min_hosts: int = option(Rules.minimum, "Fewest hosts with which --on-loss shrink goes on.", least=1)
    faults: tuple[str, ...] = option(
        (), "A fault, such as kill:host=2,step=7; repeatable.", kind=list[str], metavar="FAULT",
        flags=("--inject",),
    )  # fmt: skip
    copies: int | None = option(
        None, "Copies of each checkpoint, the own one included; 2 by default.", least=1
    )
    placement: str | None = option(
        None, "Placement of copies: group, ring, mixed or domains (default with --domains).",
        among=("group", "ring", "mixed", "domains"),
    )  # fmt: skip
    domains: tuple[str, ...] = option(
        "", "Failure domains: a,a,b,b for the hosts in turn, or a file of lines.", kind=str
    )
    mode: str = option(
        Checkpoints.mode, "Transfer of checkpoints: blocking, concurrent or idle.",
        among=("blocking", "concurrent", "idle"),
    )  # fmt: skip
    every: int = option(Checkpoints.every, "Steps between checkpoints to memory.", least=1)
    persist: str = option("", "Storage for checkpoints (fsspec).", metavar="URL")
    persist_every: int = option(
        Checkpoints.persist_every, "Steps between checkpoints that go to storage.", least=1
    )
    keep: int = option(Checkpoints.keep, "Newest checkpoints to keep in storage; 0: all.", least=0)
    on_no_checkpoint: str = option(
        Checkpoints.on_no_checkpoint,
        "If all committed steps are lost: fail (status 3), or restart at step 0.",
        among=("fail", "restart"),
    )
    network: str = option(
        "loopback", "loopback, or netns: a network for each host (root).", among=("loopback", "netns")
    )
    rate: float | None = option(
        None, "Rate of each host's network, such as 1Gbit; with --network netns.", kind=str | None
    )
    lease: float = option(
        SupervisorSettings.lease, "Seconds without a message after which a host or worker is lost."
    )
    timeout: float = option(60.0, "Time limit for forming a group and for its operations, in seconds.")
    deadlines: dict[str, float] = option(  # noqa: RUF009
        None, "A YAML file of other deadlines: a name and seconds per line.", kind=Path | None, metavar="FILE"
    )
    preload: tuple[str, ...] = option(
        "", "Modules to import before trainers start, such as transformers.trainer,lightning.", kind=str
    )
    max_restarts: int = option(
        Rules.max_own_failures, "Restarts after failures of the program itself.", least=0
    )
    external_hosts: bool = option(
        False, "Wait for hosts that join by `windtunnel host`, and emulate none.", flags=("--external-hosts",)
    )
    listen: str = option("", "Address and port for these hosts.", metavar="HOST:PORT")
    orphan_after: float = option(300.0, "Seconds that hosts, memory and trainers wait for --resume.", least=0)
    frozen_after: float = 0.0
    secret_file: Path | None = None
    tls: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {"script": Path(self.script).absolute(), "arguments": tuple(self.arguments)}
        fields["secret_file"] = self.secret_file and Path(self.secret_file).absolute()
        fields |= {"faults": tuple(self.faults or ()), "frozen_after": self.frozen_after or self.lease}
        fields["external_hosts"] = self.external_hosts or bool(self.listen or self.on)
        if isinstance(self.domains, str):
            fields["domains"] = read_domains(self.domains)
        if isinstance(self.rate, str):
            fields["rate"] = parse_rate(self.rate) if self.rate else None
        if not isinstance(self.deadlines, dict):
            fields["deadlines"] = read(Path(self.deadlines)) if self.deadlines else {}
        if isinstance(self.preload, str):
            fields["preload"] = (*PRELOAD, *filter(None, self.preload.split(",")))
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # -- for its parts ------------------------------------------------------------------------------------

    @property
    def rules(self) -> Rules:
        return Rules(self.on_loss, self.min_hosts, self.max_restarts)  # type: ignore[arg-type]

    @property
    def beat(self) -> float:
        """Seconds between signs of life of an agent."""
        return min(SupervisorSettings.beat, self.lease / 4)

    def waits(self, who: Who) -> dict[str, float]:
        """All deadlines of one part, by name."""
        chosen = {"form": self.timeout, "operation": self.timeout, **self.deadlines}
        return {wait.name: chosen.get(wait.name, wait.default) for wait in WAITS if wait.who == who}

    @property
    def supervision(self) -> SupervisorSettings:
        """For the supervisor."""
        deadlines = Deadlines(**self.waits("supervisor"))
        return SupervisorSettings(self.hosts, self.per_host, self.beat, self.lease, deadlines=deadlines)

    @property
    def checkpoints(self) -> dict[str, Any]:
        """For the `PeerCheckpointer` of each trainer, whose own arguments go before."""
        waits = self.waits("checkpoint")
        settings = {name: getattr(self, name) for name in _OF_CHECKPOINTS}
        settings |= {"copies": self.copies or min(Checkpoints.copies, self.hosts), "domains": self.domains}
        settings |= {"placement": self.placement or ("domains" if self.domains else Checkpoints.placement)}
        settings |= {"patience": waits["commit"], "stored": waits["stored"], "load": waits["load"]}
        return {name: value for name, value in settings.items() if value not in (None, "", ())}

    # -- as a record --------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """As values of JSON, for the run's log and for agents."""
        plain = dataclasses.asdict(self)
        return {**plain, **{name: plain[name] and str(plain[name]) for name in _PATHS}}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """The inverse of `plain`.

        Raises:
            UserError: it is none.
        """
        try:
            paths: dict[str, Any] = {name: plain[name] and Path(plain[name]) for name in _PATHS}
            return replace(from_plain(cls, {k: v for k, v in plain.items() if k not in _PATHS}), **paths)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the run's configuration is of another version ({error})") from error

    # -- whether it can run -------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UserError: one sentence; options are named in it as ``name``.
        """
        self._check_script()
        for declared in options(JobSpec):
            value = getattr(self, declared.name)
            if value is None:
                continue
            if declared.among and value not in declared.among:
                raise UserError(f"`{declared.name}` {value}: accepted are {', '.join(declared.among)}")
            if declared.least is not None and value < declared.least:
                raise UserError(f"`{declared.name}` {value}: at least {declared.least} is needed")
        if self.min_hosts > self.hosts:
            raise UserError(f"`min_hosts` {self.min_hosts}: more than `hosts` {self.hosts}")
        self._check_times()
        self._check_checkpoints()
        self._check_faults()
        if self.external_hosts and not (self.listen or self.on):
            raise UserError("`external_hosts`: give `listen` HOST:PORT, where the hosts find this one")
        self._check_engine()
        for name in self.preload:
            if find_spec(name.partition(".")[0]) is None:
                raise UserError(f"`preload` {name}: there is no such module installed")
        if self.tls:
            Certificates.load(self.tls).verify()
        if self.rate is not None and self.network != "netns":
            raise UserError("`rate`: the loopback has no rate to set; give `network` netns as well")

    def _check_engine(self) -> None:
        if self.on and not is_engine(self.on):
            raise UserError(f"`on` {self.on}: accepted are {ENGINES}")
        if bool(self.image) != (self.on == KUBERNETES):
            raise UserError(f"`image` {self.image or 'is missing'}: it is given with `on` {KUBERNETES} alone")
        if self.external_hosts and self.network != "loopback":
            raise UserError(f"`network` {self.network}: emulated hosts alone have one")

    def _check_script(self) -> None:
        """What Python itself would refuse is refused once, and not by every rank."""
        if not self.script.is_file():
            what = "it is a folder" if self.script.is_dir() else "no such file"
            raise UserError(f"{self.script}: {what}; give a training script in Python")
        try:
            compile(self.script.read_bytes(), str(self.script), "exec", dont_inherit=True)
        except OSError as error:
            raise UserError(f"{self.script}: it cannot be read ({error.strerror})") from error
        except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise UserError(f"{self.script}{line}: no Python that can be run ({reason})") from error

    def _check_times(self) -> None:
        for name, seconds in (("timeout", self.timeout), ("lease", self.lease)):
            if not 0 < seconds <= LONGEST:
                raise UserError(f"`{name}` {seconds:g}: it must be more than 0 seconds, at most {LONGEST:g}")

    def _check_checkpoints(self) -> None:
        if self.copies is not None and self.copies > self.hosts:
            raise UserError(f"`copies` {self.copies}: accepted are 1 to {self.hosts}, a host for each copy")
        if self.domains and len(self.domains) != self.hosts:
            counted = f"{len(self.domains)} domains for {self.hosts} hosts"
            raise UserError(f"`domains` {','.join(self.domains)}: {counted}; give one for each")
        if (
            self.domains or not self.external_hosts
        ):  # hosts that come by themselves say their domains themselves
            settings = self.checkpoints
            place(self.hosts, settings["copies"], settings["placement"], self.domains)

    def _check_faults(self) -> None:
        for text in self.faults:
            fault, ranks = parse(text), self.hosts * self.per_host
            if fault.host is not None and fault.host >= self.hosts:
                raise UserError(f"fault {text!r}: host={fault.host}, but places are 0 to {self.hosts - 1}")
            if fault.rank is not None and fault.rank >= ranks:
                raise UserError(f"fault {text!r}: rank={fault.rank}, but ranks are 0 to {ranks - 1}")
            if fault.action in ("down", "slow") and self.network != "netns":
                raise UserError(f"fault {text!r}: the hosts share one network; give `network` netns")


def read_domains(text: str) -> tuple[str, ...]:
    """The failure domain of each host: "a,a,b,b", or a file with one in each line."""
    parts = text.split(",")
    with contextlib.suppress(OSError):  # no file, or no name that one could have
        parts = Path(text).read_text().split()
    return tuple(part.strip() for part in parts if part.strip())


def parse_rate(text: str) -> float:
    """ "1Gbit", "10Mbit", "5MB": bytes/s.

    Raises:
        UserError: it is not a rate.
    """
    try:
        return parse(f"slow:host=0,step=0,rate={text}").rate
    except UserError:
        raise UserError(
            f"`rate` {text}: accepted is a rate such as 10Mbit, 1Gbit or 5MB (a second)"
        ) from None
