"""What tests of several capabilities of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import preloaded
from windtunnel.linux import forkserver_client
from windtunnel.training.job import PRELOAD

SERVER = "windtunnel.linux.forkserver"


@pytest.fixture(scope="module")
def quick_launch() -> Iterator[None]:
    """The fork server of a job that this process launches has imported what ranks need before it starts."""
    modules = (*preloaded.TORCH, *PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver_client, "subprocess", preloaded.Subprocess(SERVER, modules))
        yield
