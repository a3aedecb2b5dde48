"""What the model proxy takes on for a host's sandboxes."""

BODY = 64 * 2**20
"""Bytes of a request's body."""
REPLY = 64 * 2**20
"""Bytes of a reply's body."""
OPEN_TOTAL, OPEN_BOX = 512, 32
"""Requests that are at models at a time: those of all sandboxes, and of one."""
GATE = 120.0
"""Seconds that a reply is held for its checkpoint."""
CONNECT, SILENCE = 15.0, 600.0
"""Seconds for the model service to be reached, and to send nothing in the middle."""
SENDING = 120.0
"""Seconds for a client to send a body."""
ENDING = 5.0
"""Seconds for what is under way when the proxy closes."""
