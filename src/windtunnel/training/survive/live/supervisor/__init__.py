"""The supervisor of a run: membership generations, leases, agreements, the event log (see `server`)."""

from windtunnel.training.survive.live.supervisor.server import Supervisor
from windtunnel.training.survive.live.supervisor.settings import Deadlines, Outcome

__all__ = ["Deadlines", "Outcome", "Supervisor"]
