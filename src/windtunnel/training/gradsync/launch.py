"""A script's ranks on this host, as torchrun starts them, without what torchrun says of itself.

Ctrl-C, and a rank that fails, end all of them before the call returns. What goes wrong in windtunnel's own
part of a rank (`live.script`) comes back through the file that torchrun has for it, so that it is told once
and not by every rank.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from windtunnel.base.errors import HostError, ScriptError, UserError
from windtunnel.training.gradsync.files import check_place, read
from windtunnel.training.gradsync.model import SyncPlan

GRACE = 5
"""Seconds that ranks have to end when they are told to."""


def profile_script(
    script: str, arguments: Sequence[str], ranks: int, out: Path, codecs: Sequence[str]
) -> None:
    """Measure what the gradients of a script take between so many ranks, into ``out``; no ``codecs`` are the
    usual ones.

    Raises:
        UserError: a wrong script, codec or place, which is told before any rank begins.
        ScriptError: the script failed.
    """
    from windtunnel.training.gradsync.live.codecs import find

    for name in codecs:
        find(name)
    check_place(out)
    _launch(ranks, script, "profile", str(out), "1", ",".join(codecs), script, *arguments)


def apply_to_script(script: str, arguments: Sequence[str], ranks: int, plan: Path) -> None:
    """Train with a plan.

    Raises:
        UserError, ScriptError: as in `profile_script`.
    """
    content = read(plan, SyncPlan)
    if content.world != ranks:
        raise UserError(f"plan {plan}: it is for {content.world} ranks; `ranks` {content.world} is accepted")
    _launch(ranks, script, "apply", str(plan), script, *arguments)


def _launch(ranks: int, script: str, *arguments: str) -> None:
    """Run ``live.script`` with ``arguments`` as each rank, to the end."""
    if not Path(script).is_file():
        raise UserError(f"script {script!r} does not exist")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1" if ranks > 1 else str(os.cpu_count()))
    disabled = logging.root.manager.disable
    with tempfile.TemporaryDirectory(prefix="windtunnel-gradsync-") as folder:
        config = LaunchConfig(
            1, 1, ranks, DefaultLogsSpecs(folder), uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, shutdown_timeout=GRACE,
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )  # fmt: skip
        logging.disable(logging.CRITICAL)
        try:
            elastic_launch(config, sys.executable)(
                "-m", "windtunnel.training.gradsync.live.script", *arguments
            )
        except ChildFailedError as error:
            failure = error.get_first_failure()[1]
            message = failure.error_file_data["message"]
            if isinstance(message, dict):
                kind = UserError if failure.exitcode == UserError.status else HostError
                raise kind(message["message"].partition(": ")[2]) from None
            raise ScriptError(
                f"the script failed (status {failure.exitcode}); what it said is above"
            ) from None
        except SignalException as error:
            sys.exit(128 + error.sigval)
        finally:
            logging.disable(disabled)
