"""The supervisor of a run: membership generations, leases, agreements, the event log (see `server`)."""

from windtunnel.training.elastic.live.supervisor.server import Supervisor
from windtunnel.training.elastic.policy.state import Deadlines, Outcome

__all__ = ["Deadlines", "Outcome", "Supervisor"]
