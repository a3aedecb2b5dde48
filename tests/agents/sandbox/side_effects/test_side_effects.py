"""Effects outside: at most once, exactly once where the service helps, whatever is killed when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sandbox.side_effects.fake_payments import Payments
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy import JOURNAL, HostProxy
from windtunnel.agents.sandbox.side_effects import (
    Journal,
    NotDone,
    SideEffectError,
    SideEffectInDoubt,
    SideEffectUnderWay,
)
from windtunnel.base.errors import UserError


def agent(how: str, when: str, folder: Path) -> int:
    """A process that pays, killed ``when`` (before or after the charge, or later): its exit status."""
    child = os.fork()
    if child == 0:
        os._exit(pays(how, when, folder))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def pays(how: str, when: str, folder: Path) -> int:
    service = Payments(folder / "charges", honours_keys=how == "idempotent")

    def pay(key: str) -> dict[str, Any]:
        if when == "before":
            os._exit(9)
        charge = service.charge(5, key)
        if when == "after":
            os._exit(9)
        return charge

    if how == "plain":
        pay("")
        return 0
    check = service.lookup if how == "check" else None
    options = {"payload": 5, "check": check, "idempotent": how == "idempotent"}
    try:
        Journal(folder / "journal.sqlite").perform("box", 1, "pay the bill", pay, **options)
    except SideEffectInDoubt:
        return 3
    return 9 if when == "later" else 0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


@pytest.fixture
def payments(tmp_path: Path) -> Payments:
    return Payments(tmp_path / "charges")


def lose(key: str) -> None:
    raise TimeoutError


def test_without_a_journal_a_restored_agent_pays_twice(tmp_path: Path, payments: Payments) -> None:
    assert agent("plain", "after", tmp_path) == 9
    assert agent("plain", "never", tmp_path) == 0
    assert len(payments.charges()) == 2


@pytest.mark.parametrize(
    ("how", "when", "status", "charges"),
    [
        ("journal", "later", 0, 1),
        ("journal", "after", 3, 1),
        ("journal", "before", 3, 0),
        ("check", "after", 0, 1),
        ("check", "before", 0, 1),
        ("idempotent", "after", 0, 1),
        ("idempotent", "before", 0, 1),
    ],
)
def test_killed_and_restored_agent(
    tmp_path: Path, payments: Payments, how: str, when: str, status: int, charges: int
) -> None:
    assert agent(how, when, tmp_path) == 9
    assert agent(how, "never", tmp_path) == status
    assert agent(how, "never", tmp_path) == status
    assert len(payments.charges()) == charges


def test_done_effect_is_not_made_again(journal: Journal, payments: Payments) -> None:
    first = journal.perform("box", 3, "pay", lambda key: payments.charge(5, key), payload={"amount": 5})
    again = journal.perform("box", 4, "pay", lambda key: payments.charge(5, key), payload={"amount": 5})
    assert first == again == payments.charges()[0]
    journal.perform("box", 4, "pay", lambda key: payments.charge(6, key), payload={"amount": 6})
    journal.perform("box", 4, "pay", lambda key: payments.charge(5, key), payload={"amount": 5}, key="second")
    journal.perform("other", 1, "pay", lambda key: payments.charge(5, key), payload={"amount": 5})
    assert [charge["amount"] for charge in payments.charges()] == [5, 6, 5, 5]
    assert len({charge["key"] for charge in payments.charges()}) == 4
    (effect, *_) = journal.side_effects("box")
    assert (effect.intent, effect.turn, effect.state, effect.result) == ("pay", 3, "done", first)


def test_result_that_json_cannot_hold(journal: Journal) -> None:
    with pytest.raises(SideEffectError, match="happened, but its result cannot be recorded"):
        journal.perform("box", 1, "a", lambda key: object())
    with pytest.raises(SideEffectError, match="happened, but its result cannot be recorded"):
        journal.perform("box", 1, "a", lambda key: pytest.fail("was called"))


def test_forks_share_what_was_before_and_nothing_after(journal: Journal, payments: Payments) -> None:
    def pay(box: str, turn: int, what: str) -> Any:
        return journal.perform(box, turn, what, lambda key: payments.charge(1, key))

    before = pay("root", 2, "before")
    pay("root", 3, "after")
    for fork in ("left", "right"):
        journal.fork("root", fork, 2)
    journal.fork("left", "leaf", 2)
    assert [pay(box, 3, "before") for box in ("left", "right", "leaf")] == [before] * 3
    after = [pay(box, 3, "after")["id"] for box in ("left", "right", "leaf")]
    assert len({*after}) == 3
    assert len(payments.charges()) == 5
    assert [effect.intent for effect in journal.side_effects("left")] == ["before", "after"]
    with pytest.raises(UserError, match="has a past already"):
        journal.fork("root", "left", 2)
    journal.retire("root")
    assert pay("left", 3, "before") == before
    assert pay("root", 1, "before") != before, "a new sandbox of the old name"


def test_a_fork_shares_what_was_before_in_an_earlier_process(tmp_path: Path, payments: Payments) -> None:
    def pay(box: str) -> Any:
        with Journal(tmp_path / JOURNAL) as journal:
            return journal.perform(box, 1, "pay", lambda key: payments.charge(1, key))

    before = pay("root")
    proxy = HostProxy(Home(tmp_path))
    proxy.forked("root", "leaf", 1)
    assert pay("leaf") == before and len(payments.charges()) == 1
    proxy.forget("leaf")
    assert pay("leaf") != before, "a new sandbox of the old name"
    proxy.close()


def test_forks_settle_an_ancestors_doubt_each_for_itself(journal: Journal) -> None:
    with pytest.raises(TimeoutError):
        journal.perform("root", 1, "a", lose)
    journal.fork("root", "left", 1)
    journal.fork("root", "right", 1)
    with pytest.raises(SideEffectInDoubt):
        journal.perform("left", 2, "a", lose)
    assert journal.perform("left", 2, "a", lose, check=lambda key: "happened") == "happened"
    tokens: list[str] = []
    journal.perform("right", 2, "a", lambda key: tokens.append(key), check=lambda key: None)
    assert tokens != [journal.side_effects("root")[0].token], "another effect than the ancestor's"
    with pytest.raises(SideEffectInDoubt):
        journal.perform("root", 2, "a", lose)


def test_threads_and_processes_make_one_call(journal: Journal, tmp_path: Path) -> None:
    calls: list[str] = []
    inside, go = threading.Event(), threading.Event()

    def slow(key: str) -> str:
        calls.append(key)
        inside.set()
        assert go.wait(60)
        return "done"

    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(journal.perform("box", 1, "a", slow)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    with Journal(tmp_path / "journal.sqlite") as second, pytest.raises(SideEffectUnderWay):
        second.wait_seconds = 0.05
        second.perform("box", 1, "a", slow)
    go.set()
    for thread in threads:
        thread.join(60)
    assert results == ["done"] * 6
    assert len(calls) == 1


@pytest.mark.parametrize("bad", [("", 1, "a"), ("box", -1, "a"), ("box", 1, "")])
def test_bad_input(journal: Journal, bad: tuple[str, int, str]) -> None:
    with pytest.raises(UserError, match="not accepted"):
        journal.perform(*bad, lambda key: None)


def test_file_is_the_owners_alone(journal: Journal, tmp_path: Path) -> None:
    journal.perform("box", 1, "a", lambda key: None)
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


OUTCOMES = st.sampled_from(["done", "refused", "lost before", "lost after"])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), OUTCOMES), max_size=25),
    st.sampled_from(["none", "check", "idempotent"]),
)
def test_never_twice_whatever_happens(
    tmp_path_factory: Any, steps: list[tuple[int, str]], helped: str
) -> None:
    folder = tmp_path_factory.mktemp("never-twice")
    payments = Payments(folder / "charges", honours_keys=helped == "idempotent")
    with Journal(folder / "journal.sqlite") as journal:
        for amount, outcome in steps:
            known = {effect.intent: effect.state for effect in journal.side_effects("box")}.get(
                f"pay {amount}"
            )
            try:
                journal.perform(
                    "box",
                    1,
                    f"pay {amount}",
                    ending(payments, amount, outcome),
                    check=payments.lookup if helped == "check" else None,
                    idempotent=helped == "idempotent",
                )
            except SideEffectInDoubt:
                assert helped == "none"
                assert known == "unknown"
            except (NotDone, ConnectionError):
                assert known != "done"
            amounts = [charge["amount"] for charge in payments.charges()]
            assert len(amounts) == len(set(amounts))
        for effect in journal.side_effects("box"):
            if effect.state in ("done", "failed"):
                assert (payments.lookup(effect.token) is not None) == (effect.state == "done")


def ending(payments: Payments, amount: int, outcome: str) -> Callable[[str], Any]:
    def call(key: str) -> Any:
        if outcome == "refused":
            raise NotDone
        if outcome == "lost before":
            raise ConnectionError
        charge = payments.charge(amount, key)
        if outcome == "lost after":
            raise ConnectionError
        return charge

    return call


def test_a_check_that_cannot_tell_leaves_the_doubt(journal: Journal) -> None:
    def cannot_tell(key: str) -> None:
        raise OSError("service is down")

    with pytest.raises(TimeoutError):
        journal.perform("box", 1, "a", lose)
    with pytest.raises(SideEffectInDoubt, match="service is down"):
        journal.perform("box", 1, "a", lose, check=cannot_tell)
    assert journal.perform("box", 1, "a", lose, check=lambda key: key) == journal.side_effects("box")[0].token
