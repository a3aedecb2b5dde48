"""The fault of this part."""

from windtunnel.base.errors import HostError


class InspectError(HostError):
    """The inspector cannot work here, or not any more; in one sentence why."""
