"""``windtunnel train``: run a script so that it survives; ``windtunnel host``: lend it one more host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli.common import Arguments, Json
from windtunnel.cli.options import takes
from windtunnel.training.elastic.spec import JobSpec

DEFAULT = JobSpec()
SECRET = typer.Option(
    metavar="FILE",
    help="File with the job's secret (mode 0600). Default: WINDTUNNEL_SECRET, or a new secret.",
)
CERTIFICATE = typer.Option(
    metavar="FILE", help="This host's certificate (PEM), to encrypt connections between hosts (TLS 1.3)."
)
KEY = typer.Option(metavar="FILE", help="Private key of the certificate (mode 0600).")
CA = typer.Option(metavar="FILE", help="CA certificate of all hosts of the job.")
RESUMED = ("resume", "as_json", "secret_file", "tls_cert", "tls_key", "tls_ca")


@takes(JobSpec)
def train(
    context: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="A torchrun-style training script.")
    ] = None,
    arguments: Arguments = None,
    options: JobSpec = DEFAULT,
    secret_file: Annotated[Path | None, SECRET] = None,
    tls_cert: Annotated[Path | None, CERTIFICATE] = None,
    tls_key: Annotated[Path | None, KEY] = None,
    tls_ca: Annotated[Path | None, CA] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Take over a run whose launcher is gone: its name, how it begins, last, or its folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run's files. Default: one in the store.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run SCRIPT on emulated hosts, and recover it from their failures.

    Options come before SCRIPT; what follows it is the script's own. The script's output appears as it comes,
    lines of other ranks than 0 with their rank. Exit status 0 when all ranks ended well, 1 when the job
    failed, 3 when what was asked for could not be reached.

    Example: windtunnel train --hosts 4 --inject "kill:host=2,step=7" train.py
    """
    from windtunnel.base import tls
    from windtunnel.training.session import resume_and_store, train_and_store

    certificates = (tls_cert, tls_key, tls_ca)
    if resume is not None:
        _only(context, *RESUMED)
        resume_and_store(
            resume,
            as_json=as_json,
            secret_file=secret_file,
            certificates=certificates,
        )
        return
    if script is None:
        raise typer.BadParameter("a training script is needed, or --resume RUN", param_hint="SCRIPT")
    job = replace(
        options,
        script=script,
        arguments=tuple(arguments or ()),
        secret_file=secret_file,
        tls=tls.certificate_files(*certificates),
    )
    train_and_store(job, out, as_json=as_json)


def _only(context: typer.Context, *accepted: str) -> None:
    """Raises UserError where another option is given beside --resume, or a script."""
    from windtunnel.base.errors import UserError

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in accepted and source is not None and source.name == "COMMANDLINE":
            flag = max(parameter.opts, key=len) if parameter.param_type_name == "option" else name.upper()
            raise UserError(
                f"--resume: {flag} is that of the run and cannot be given; accepted are --secret-file, "
                "--tls-cert, --tls-key, --tls-ca and --json"
            )


def host(
    launcher: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where `windtunnel train --external-hosts` listens.")
    ],
    address: Annotated[
        str, typer.Option(help="This host's address for its peers. Default: the connection's address.")
    ] = "",
    domain: Annotated[str, typer.Option(help="Failure domain of the host, such as a rack or switch.")] = "",
    secret_file: Annotated[Path | None, SECRET] = None,
    tls_cert: Annotated[Path | None, CERTIFICATE] = None,
    tls_key: Annotated[Path | None, KEY] = None,
    tls_ca: Annotated[Path | None, CA] = None,
) -> None:
    """Join this host to a job that was started elsewhere, until the job ends.

    Example: windtunnel host 10.0.0.1:29400 --domain rack-3
    """
    from windtunnel.training.session import lend

    raise typer.Exit(lend(launcher, address, domain, secret_file, (tls_cert, tls_key, tls_ca)))
