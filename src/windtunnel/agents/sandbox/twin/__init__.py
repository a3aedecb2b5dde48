"""The twin: hosts full of sandboxes, emulated from the load of their turns and measured costs.

The classes of turns, the order of checkpoints, what may be forgotten and what is saved on a notice are
decided by the very code that live sandboxes use (``policy``); only the machine is a model. ``loads`` says
what turns ask of a machine; ``clock`` is the emulated time and what is shared in it; ``scheduler`` the
engine; ``setup`` and ``world`` the hosts and sandboxes; ``questions`` what is asked of them; ``observed``
compares with measured runs.
"""

from __future__ import annotations
