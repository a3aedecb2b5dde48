"""What tests of several capabilities of training share."""

from __future__ import annotations

from training.host_helpers import go as go  # a fixture
