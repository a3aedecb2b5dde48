"""What requests may hold. A field that is not known is refused, so that a typo is not ignored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from windtunnel.agents.sandbox.model import Limits, Network, SandboxSpec


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LimitsBody(Body):
    memory: int | None = Field(default=Limits.memory, ge=1, description="Bytes; null: unbounded.")
    cpus: float | None = Field(
        default=Limits.cpus, gt=0, description="1.5 is one and a half CPUs; null: unbounded."
    )
    pids: int | None = Field(default=Limits.pids, ge=1, description="Processes and threads; null: unbounded.")
    disk: int | None = Field(default=Limits.disk, ge=1, description="Bytes; null: unbounded.")


class SpecBody(Body):
    """How a sandbox is made."""

    name: str
    image: str = Field(
        "host", description="'host', a directory, a tarball, an OCI layout, or an image imported before."
    )
    network: Network = "off"
    limits: LimitsBody = LimitsBody()
    environment: dict[str, str] = Field(default_factory=dict)
    workdir: str = "/workspace"
    hostname: str = ""
    services: dict[str, str] = Field(
        default_factory=dict, description="Commands that a restore without processes starts again."
    )
    proxy_upstream: str = Field("", description="Base URL of the model API, for the network 'proxy'.")

    def spec(self) -> SandboxSpec:
        plain = self.model_dump()
        return SandboxSpec(**{**plain, "limits": Limits(**plain["limits"])})


class Command(Body):
    """A command of a sandbox."""

    command: str = Field(description="Text for the shell.")
    shell: str = Field("main", description="The persistent shell that runs it.")
    timeout: float | None = Field(None, gt=0, description="Seconds until it is cut off; null: never.")
    stream: bool = Field(True, description="Answer with lines of JSON as the output comes, or once.")
    cancel_on_disconnect: bool = Field(True, description="Cancel the command when the client goes away.")
    id: str = Field("", max_length=64, description="A name of the client's choice, to cancel it by.")
    turn: bool = Field(False, description="End the turn after it.")
    request: str = Field("", description="Id of the model request that the turn belongs to.")


class TurnEnd(Body):
    request: str = ""
    urgent: bool = Field(False, description="Somebody waits for the checkpoint already.")


class CheckpointBody(Body):
    label: str = ""
    full: bool = Field(False, description="Dump the processes in any case.")
    pin: bool = Field(False, description="Never dropped by the retention.")


class RestoreBody(Body):
    checkpoint: str = Field("", description="Id, or the beginning of one; empty: the newest.")
    lazy: bool = Field(False, description="Bring memory page by page while it already runs.")


class ForkBody(Body):
    checkpoint: str = Field(description="Id, the beginning of one, or a sandbox's name (its state now).")
    count: int = Field(1, ge=1, le=4096)
    names: list[str] | None = None
    lazy: bool = False


class GcBody(Body):
    dry_run: bool = False


class ExportBody(Body):
    checkpoint: str
    url: str = Field(description="A directory of the daemon's host, or a URL that fsspec knows.")


class ImportBody(Body):
    url: str
    name: str


class NoticeBody(Body):
    seconds: float = Field(gt=0, description="How long the machine will still be there.")


class CommandAnswer(BaseModel):
    """What a command did, where no stream was asked for. The base64 fields hold the exact bytes where the
    text cannot."""

    stdout: str
    stderr: str
    stdout_base64: str | None
    stderr_base64: str | None
    exit_code: int | None
    seconds: float
    ended: str
    note: str
    turn: dict[str, object] | None
