"""Process images by CRIU: find it, dump and restore with it, say why it refused, install it."""

from windtunnel.agents.sandbox.criu.doctor import Rung, doctor, ladder, rung
from windtunnel.agents.sandbox.criu.program import find_criu, setup
from windtunnel.agents.sandbox.criu.run import Criu

__all__ = [
    "Criu",
    "Rung",
    "doctor",
    "find_criu",
    "ladder",
    "rung",
    "setup",
]
