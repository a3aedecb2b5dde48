"""The section on what authentication costs measures real checkpoints, and leaves nothing patched behind."""

from __future__ import annotations

from benchmarks.training.checkpoint.auth import auth_rows
from windtunnel.base import handshake, wire


def test_the_share_of_handshakes_and_tags_is_measured() -> None:
    before = wire.Session.seal, wire.Session.verify, handshake.Client.prove, handshake.Server.take
    rows = {row.name: row for row in auth_rows(quick=True)}
    assert (wire.Session.seal, wire.Session.verify, handshake.Client.prove, handshake.Server.take) == before
    share = rows["… of it handshakes and tags"]
    assert share.measured is not None and 0 < share.measured < 100
    assert share.met == (share.measured <= 1)
    assert "12 steps of handshakes" in share.note  # two connections to prepare a copy, two to send it
    assert rows["a checkpoint of two ranks over TLS"].measured
    assert "ms of CPU more than" in rows["… of it TLS"].note
