"""The fault of this part."""


class InspectError(Exception):
    """The inspector cannot work here, or not any more; in one sentence why."""
