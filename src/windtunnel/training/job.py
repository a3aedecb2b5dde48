"""What is launched: a script, its hosts, what is done at a loss; checked before anything starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.tls import Certificates
from windtunnel.training.elastic.faults import parse
from windtunnel.training.elastic.policy.rules import Rules

# What a trainer will import anyway: torch._dynamo with the first optimizer of a process, SciPy where
# pipelines are laid out anew after a loss.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "scipy.optimize",
    "windtunnel.training.checkpoint.live.checkpointer",
    "windtunnel.training.elastic.live.run",
)


@dataclass(frozen=True)
class JobSpec:
    """What is launched.

    ``hosts`` hosts of ``per_host`` ranks, and ``spares`` more that wait. ``domains``: failure domain of
    each host, in turn. ``settings``: for the workers (environment variable WINDTUNNEL_CHECKPOINT).
    ``network``: "loopback", or "netns" for a network of its own for each host, limited to ``rate``
    bytes/s. Seconds: ``lease`` of hosts, ``frozen_after`` of workers, ``replace_after`` until a host
    that was ordered comes, ``orphan_after`` until an agent without supervisor ends, ``timeout`` of operations
    of the process group where the program does not say; ``deadlines``: others, by name (`deadlines.WAITS`),
    which go before the ones here. ``preload``: modules that trainers find imported. ``listen``: "host:port"
    where hosts that are not ours ask for the job; then none are emulated. ``secret_file``: with the secret
    that the job's processes share; None: that of the environment (`base.keys`), or a new one. ``tls``: the
    files of the certificates with which connections are encrypted (`tls.OPTIONS`).
    """

    script: Path
    arguments: tuple[str, ...]
    hosts: int
    per_host: int = 1
    spares: int = 0
    rules: Rules = field(default_factory=Rules)
    faults: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    domains: tuple[str, ...] = ()
    network: str = "loopback"
    rate: float | None = None
    lease: float = 1.0
    frozen_after: float = 1.0
    beat: float = 0.1
    replace_after: float = 0.0
    orphan_after: float = 300.0
    timeout: float = 60.0
    deadlines: dict[str, float] = field(default_factory=dict)
    listen: str | None = None
    secret_file: Path | None = None
    tls: tuple[str, ...] = ()
    preload: tuple[str, ...] = PRELOAD
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)

    def plain(self) -> dict[str, Any]:
        """As values of JSON, for the run's log."""
        secret = None if self.secret_file is None else str(self.secret_file.absolute())
        paths = {"script": str(self.script), "cwd": str(self.cwd), "secret_file": secret}
        return {**asdict(self), **paths}

    @staticmethod
    def of(plain: dict[str, Any]) -> JobSpec:
        """The inverse of `plain`.

        Raises:
            UserError: it is none.
        """
        try:
            lists = {
                name: tuple(plain[name]) for name in ("arguments", "faults", "domains", "preload", "tls")
            }
            paths = {name: plain[name] and Path(plain[name]) for name in ("script", "cwd", "secret_file")}
            return JobSpec(**{**plain, **lists, **paths, "rules": Rules(**plain["rules"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"the run's configuration is of another version ({error})") from error

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UserError: one sentence.
        """
        self._check_script()
        for name, least in (("hosts", 1), ("per_host", 1), ("spares", 0)):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"{name} is {value}, at least {least} is needed")
        for text in self.faults:
            fault = parse(text)
            if fault.host is not None and fault.host >= self.hosts:
                raise UserError(f"fault {text!r}: host={fault.host}, but places are 0 to {self.hosts - 1}")
            if fault.rank is not None and fault.rank >= self.hosts * self.per_host:
                last = self.hosts * self.per_host - 1
                raise UserError(f"fault {text!r}: rank={fault.rank}, but ranks are 0 to {last}")
            if fault.action in ("down", "slow") and self.network != "netns":
                raise UserError(f"fault {text!r}: the hosts share one network; accepted with --network netns")
        for name in self.preload:
            if find_spec(name.partition(".")[0]) is None:
                raise UserError(f"preload {name}: there is no such module installed")
        if self.tls:
            Certificates.load(self.tls).verify()
        if self.network not in ("loopback", "netns"):
            raise UserError(f"network {self.network!r}: accepted are loopback and netns")
        if self.rate is not None and self.network != "netns":
            raise UserError("rate: the loopback has no rate to set; give --network netns as well")
        if not 0 < 2 * self.beat <= self.lease:
            raise UserError(f"lease {self.lease:g} s: at least {2 * self.beat:g} s are needed")

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
            told = error.msg if isinstance(error, SyntaxError) else str(error)
            raise UserError(f"{self.script}{line}: no Python that can be run ({told})") from error
