"""``windtunnel train``: run a script so that it survives; ``windtunnel host``: lend it one more host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SECRET = typer.Option(
    metavar="FILE",
    help="The secret that the job's processes share (mode 0600); else WINDTUNNEL_SECRET, else one is made.",
)
CERTIFICATE = typer.Option(
    metavar="FILE", help="Encrypt all connections between hosts (TLS 1.3): this host's certificate, PEM."
)
KEY = typer.Option(metavar="FILE", help="The certificate's private key (mode 0600).")
CA = typer.Option(metavar="FILE", help="The CA whose certificates all hosts of the job have.")
RESUMED = ("resume", "as_json", "secret_file", "tls_cert", "tls_key", "tls_ca")
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("train", context_settings=SETTINGS)(train)
    app.command("host")(host)
    app.command("node", hidden=True)(host)  # torchrun's word


def train(
    context: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="A torchrun-style training script.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
    ] = None,
    hosts: Annotated[int, typer.Option("--hosts", "--nodes", help="Hosts, emulated on this computer.")] = 1,
    per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    spares: Annotated[int, typer.Option(help="Further hosts that wait for a loss.")] = 0,
    on_loss: Annotated[
        str, typer.Option(help="replace the host, shrink the job, or restart every process.")
    ] = "replace",
    min_hosts: Annotated[int, typer.Option(help="Fewest hosts with which --on-loss shrink goes on.")] = 1,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="A fault, such as kill:host=2,step=7; repeatable."),
    ] = None,
    copies: Annotated[
        int | None, typer.Option(help="Copies of each checkpoint, the own one included; 2 by default.")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(help="Of copies: group, ring, mixed or domains (default where they are given)."),
    ] = None,
    domains: Annotated[
        str, typer.Option(help="What fails together: a,a,b,b for the hosts in turn, or a file of lines.")
    ] = "",
    mode: Annotated[str, typer.Option(help="Of checkpoints: blocking, concurrent or idle.")] = "concurrent",
    slots: Annotated[int, typer.Option(help="Steps that are kept of each copy, 2 or 3.")] = 2,
    every: Annotated[int, typer.Option(help="Steps between checkpoints to memory.")] = 1,
    budget: Annotated[
        float | None,
        typer.Option(help="Share of the time that these may cost (0.03): how often is then measured."),
    ] = None,
    persist: Annotated[str, typer.Option(metavar="URL", help="Storage for checkpoints (fsspec).")] = "",
    persist_every: Annotated[int, typer.Option(help="Steps between checkpoints that go to storage.")] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay in storage, the newest; 0: all.")] = 0,
    on_no_checkpoint: Annotated[
        str, typer.Option(help="When every committed step is lost: fail (status 3), or restart at step 0.")
    ] = "fail",
    network: Annotated[
        str, typer.Option(help="loopback, or netns: a network for each host (root).")
    ] = "loopback",
    rate: Annotated[str, typer.Option(help="Of each host's network, such as 1Gbit; with netns.")] = "",
    lease: Annotated[
        float, typer.Option(help="Seconds of silence after which a host or worker is given up.")
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks have to form a group, and its operations to end.")
    ] = 60.0,
    deadlines: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="All other deadlines: YAML, a name and seconds a line."),
    ] = None,
    preload: Annotated[
        str,
        typer.Option(
            help="Modules that trainers find imported when they start: transformers.trainer,lightning."
        ),
    ] = "",
    max_restarts: Annotated[int, typer.Option(help="How often the program may end by its own fault.")] = 3,
    replace_after: Annotated[float, typer.Option(help="Seconds until a host that was ordered comes.")] = 0.0,
    external_hosts: Annotated[
        bool, typer.Option("--external-hosts", help="Hosts come by `windtunnel host`; none is emulated.")
    ] = False,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where such hosts find this one.")] = "",
    secret_file: Annotated[Path | None, SECRET] = None,
    tls_cert: Annotated[Path | None, CERTIFICATE] = None,
    tls_key: Annotated[Path | None, KEY] = None,
    tls_ca: Annotated[Path | None, CA] = None,
    orphan_after: Annotated[
        float, typer.Option(help="Seconds that hosts, memory and trainers wait for --resume, then end.")
    ] = 300.0,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Take over a run whose launcher is gone: its name, how it begins, last, or its folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run's files; else one in the store.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="stdout gets the summary as one JSON object, and nothing else.")
    ] = False,
) -> None:
    """Run SCRIPT on emulated hosts, and carry it over their failures.

    Options come before SCRIPT; what follows it is the script's own. The script's output appears as it comes,
    lines of other ranks than 0 with their rank. Exit status 0 when all ranks ended well, 1 when the job
    failed, 3 when what was asked for could not be reached.

    Example: windtunnel train --hosts 4 --inject "kill:host=2,step=7" train.py
    """
    from windtunnel.training.session import Request, resume_and_store, train_and_store

    if resume is not None:
        _only(context, *RESUMED)
        resume_and_store(
            resume,
            as_json=as_json,
            secret_file=secret_file,
            certificates=(tls_cert, tls_key, tls_ca),
        )
        return
    if script is None:
        raise typer.BadParameter("a training script is needed, or --resume RUN", param_hint="SCRIPT")
    train_and_store(
        Request(
            script=script,
            arguments=tuple(arguments or ()),
            hosts=hosts,
            per_host=per_host,
            spares=spares,
            on_loss=on_loss,
            min_hosts=min_hosts,
            faults=tuple(inject or ()),
            copies=copies,
            placement=placement,
            domains=domains,
            mode=mode,
            slots=slots,
            every=every,
            budget=budget,
            persist=persist,
            persist_every=persist_every,
            keep=keep,
            on_no_checkpoint=on_no_checkpoint,
            network=network,
            rate=rate,
            lease=lease,
            timeout=timeout,
            deadlines=deadlines,
            preload=preload,
            max_restarts=max_restarts,
            replace_after=replace_after,
            external=external_hosts,
            listen=listen,
            secret_file=secret_file,
            tls=(tls_cert, tls_key, tls_ca),
            orphan_after=orphan_after,
        ),
        out,
        as_json=as_json,
    )


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _only(context: typer.Context, *accepted: str) -> None:
    """Raises UserError where another option is given beside --resume, or a script."""
    from windtunnel.base.errors import UserError

    for name in context.params:
        if name not in accepted and _given(context, name):
            told = name.upper() if name in ("script", "arguments") else f"--{name.replace('_', '-')}"
            raise UserError(
                f"--resume: {told} is that of the run and cannot be given; accepted are --secret-file, "
                "--tls-cert, --tls-key, --tls-ca and --json"
            )


def host(
    launcher: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where `windtunnel train --external-hosts` listens.")
    ],
    address: Annotated[
        str, typer.Option(help="Address of this host for its peers; else that of the connection.")
    ] = "",
    domain: Annotated[str, typer.Option(help="What fails together with it: a rack, a switch.")] = "",
    secret_file: Annotated[Path | None, SECRET] = None,
    tls_cert: Annotated[Path | None, CERTIFICATE] = None,
    tls_key: Annotated[Path | None, KEY] = None,
    tls_ca: Annotated[Path | None, CA] = None,
) -> None:
    """Lend this host to a job that was begun elsewhere; ends with the job.

    Example: windtunnel host 10.0.0.1:29400 --domain rack-3
    """
    from windtunnel.training.session import lend

    raise typer.Exit(lend(launcher, address, domain, secret_file, (tls_cert, tls_key, tls_ca)))
