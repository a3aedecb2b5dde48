"""Foreign programs of the matrix come back whole, and so they do when something is killed at random."""

from __future__ import annotations

import pytest

from benchmarks.agents.sandbox.harness import missing as no_sandboxes
from conformance.sandbox.kills import kills_rows
from conformance.sandbox.matrix.run import matrix_rows
from support import small_image
from windtunnel.agents.sandbox.files import host_image

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(no_sandboxes()), reason=no_sandboxes() or "real sandboxes run here"),
]


@pytest.mark.parametrize("campaign", [matrix_rows, kills_rows])
def test_nothing_is_lost(campaign, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(host_image, "WANTED", small_image.WHOLE)  # git is one of the programs
    rows = list(campaign(quick=True))
    assert [f"{row.name}: {row.note}" for row in rows if row.passed is False] == []
    assert any(row.passed for row in rows)
