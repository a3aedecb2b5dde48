"""Who is silent, and when silence says nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.elastic.policy.evidence import Leases


@given(gaps=st.lists(st.floats(0.0, 0.49), max_size=20), late=st.floats(0.01, 5.0))
def test_who_gives_no_sign_for_a_lease_is_silent_and_nobody_else(gaps: list[float], late: float) -> None:
    """The looker looks often enough: at each sign of the one that lives."""
    leases: Leases[str] = Leases(1.0)
    now = 0.0
    for key in ("lives", "dead"):
        leases.renew(key, now)
    for gap in gaps:
        now += gap
        assert not leases.forgive(now)
        assert leases.silent(now).keys() == ({"dead"} if now > 1.0 else set())
        leases.renew("lives", now)
    leases.end("lives")
    assert "lives" not in leases.silent(now + late)


def test_a_looker_that_was_stopped_forgives_all_once() -> None:
    leases: Leases[str] = Leases(1.0)
    leases.renew("a", 0.0)
    leases.forgive(0.0)
    assert leases.forgive(0.6) and leases.silent(1.5) == {}
    assert not leases.forgive(1.0)
    assert not leases.forgive(1.5) and leases.silent(1.7).keys() == {"a"}


def test_a_sign_of_earlier_shortens_no_lease() -> None:
    """A host of which only the log tells has longer to come back."""
    leases: Leases[str] = Leases(1.0)
    leases.renew("a", 3.0)
    leases.renew("a", 0.0)
    assert leases.silent(3.9) == {} and leases.silent(4.1).keys() == {"a"}
