"""Emulates the groups of a sweep on a Ray cluster: the same code, on machines where windtunnel is installed.

The script has to lie under the same path on every machine. Runs go to the store of the machine that did them,
unless ``WINDTUNNEL_HOME`` is a shared folder or ``WINDTUNNEL_STORE`` a shared database; the outcomes come
back one by one and are written here, so that a kill of this process loses only what was in the air.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.training.emulate.sweep.execute import emulate_group, write_row
from windtunnel.training.emulate.sweep.plan import Point


def emulate_on_ray(
    address: str,
    todo: list[list[Point]],
    folder: Path,
    capture_jobs: int,
    pictures: bool,
    count: Callable[[], None],
) -> None:
    """Emulate ``todo`` on the Ray cluster at ``address`` (``local``: one of this machine alone).

    Raises:
        UserError: Ray is not installed, or there is no Ray cluster at ``address``.
        ScriptError: Ray lost a process; the points that ended before are kept.
    """
    try:
        import ray
    except ImportError:
        raise UserError(
            f"--ray is {address!r}, but Ray is not installed, get it by: pip install 'windtunnel[control]'"
        ) from None
    shared = {
        name: os.environ[name] for name in ("WINDTUNNEL_HOME", "WINDTUNNEL_STORE") if name in os.environ
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here reports to nobody
    try:
        _knock(address)
        ray.init(
            address=address,
            runtime_env={"env_vars": shared},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--ray is {address!r}, but no Ray cluster answers there ({reason}), accepted is HOST:PORT, "
            "ray://HOST:PORT, auto or local"
        ) from None
    try:
        # Each outcome is sent as it is yielded, not when the group has ended.
        remote = ray.remote(num_cpus=1, max_retries=0)(emulate_group).options(num_returns="streaming")
        waiting: list[Any] = [remote.remote(group, capture_jobs, pictures) for group in todo]
        while waiting:
            ready: list[Any] = ray.wait(waiting, num_returns=1)[0]
            try:
                row: Any = ray.get(next(ready[0]))
                write_row(folder, row)
                count()
            except StopIteration:
                waiting.remove(ready[0])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise ScriptError(
            f"Ray lost a process of the sweep ({reason}); run the same command again to go on"
        ) from None
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError when nobody answers: Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5.0).close()
