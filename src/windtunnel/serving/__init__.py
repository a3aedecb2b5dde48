"""Serving: an engine around Transformers' own models, its policies, and model variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.serving.engine.emulation import Emulated


def simulate(**options: Any) -> Emulated:
    """A trace of requests on a cluster that is not there, kept as a run; the arguments are the fields of
    `windtunnel.serving.engine.settings.ServeSettings`.

    Raises:
        UserError: something that was asked for is wrong.
    """
    from windtunnel.serving.engine.emulation import emulate
    from windtunnel.serving.engine.settings import ServeSettings

    return emulate(ServeSettings(**options))
