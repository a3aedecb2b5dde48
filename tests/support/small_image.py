"""For tests of sandboxes: the image of this machine without git, pip and what they need: most of its files.

Nearly every home of a test makes that image anew. Tests of the image itself ask for all of it (`WHOLE`).
"""

from __future__ import annotations

from windtunnel.agents.sandbox.files import host_image

WHOLE = host_image.WANTED
host_image.WANTED = [name for name in WHOLE if name not in ("ca-certificates", "git", "python3-pip")]
