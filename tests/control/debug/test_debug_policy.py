"""Orders by snapshots, and all others within a bound: held against brute force."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.control.debug.policy import Observation, Step, Transaction, decide, serial


def writer(id_: int, xmax: int, *active: int, request: int = 0) -> Transaction:
    return Transaction(request or id_, id_, xmax, active)


def test_a_snapshot_shows_what_had_committed_and_ids_do_not_matter() -> None:
    # 4 and 6 begin before 4 commits, 5 after it, though its id is lower than 6: R3's artefact goes wrong here
    transactions = (writer(4, 4), writer(5, 5), writer(6, 5, 4))
    (order,) = decide(Observation(transactions)).orders
    assert order == (Step(0), Step(2), Step(1, (0,)))


def test_readers_come_before_the_next_writer() -> None:
    transactions = (writer(1, 1), Transaction(7, 0, 1), writer(2, 2), Transaction(8, 0, 2))
    (order,) = decide(Observation(transactions)).orders
    assert [step.run for step in order] == [1, 0, 3, 2]
    assert [step.commit for step in order] == [(), (), (0,), ()]


def test_serial_is_the_order_in_which_requests_came() -> None:
    transactions = (Transaction(1, 1, 1, begun=2.0), Transaction(2, 2, 2, begun=1.0))
    assert serial(Observation(transactions)).orders == ((Step(1), Step(0, (1,))),)


@st.composite
def histories(draw: st.DrawFn) -> Observation:
    """Up to three requests of up to three transactions, one after the other in one order, with times."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    line = draw(st.permutations([r for r, size in enumerate(sizes) for _ in range(size)]))[:6]
    tables = st.lists(st.sampled_from("ab"), max_size=2, unique=True).map(tuple)
    begun = {r: line.index(r) - draw(st.sampled_from([0.5, 1.5])) for r in line}
    transactions = [
        Transaction(r, place + 1, place + 1, (), begun[r], place + 0.25, draw(tables), draw(tables))
        for place, r in enumerate(line)
    ]
    return Observation(tuple(transactions), draw(st.integers(0, 3)), 10_000)


def brute_force(observation: Observation) -> set[tuple[bool, ...]]:
    """The ways in which conflicts may be decided, from all orders of all transactions."""
    transactions = observation.transactions
    over = {transaction.request: transaction.ended for transaction in transactions}  # the last one stays
    outcomes = set()
    for order in permutations(range(len(transactions))):
        place = {k: number for number, k in enumerate(order)}
        pairs = [(i, j) for j in range(len(transactions)) for i in range(j)]
        fixed = [
            (i, j) for i, j in pairs
            if transactions[i].request == transactions[j].request
            or over[transactions[i].request] < transactions[j].begun
        ]  # fmt: skip
        departures = sum(order[p] != min(order[p:]) for p in range(len(order)))
        if departures > observation.preemptions or any(place[i] > place[j] for i, j in fixed):
            continue
        conflicts = [
            (i, j) for i, j in pairs
            if (i, j) not in fixed
            and {*transactions[i].writes} & {*transactions[j].reads, *transactions[j].writes}
            | {*transactions[i].reads} & {*transactions[j].writes}
        ]  # fmt: skip
        outcomes.add(tuple(place[i] < place[j] for i, j in conflicts))
    return outcomes


@given(histories())
def test_all_orders_within_the_bound_are_there_once(observation: Observation) -> None:
    decision, expected = decide(observation), brute_force(observation)
    assert decision.counted
    assert len(decision.orders) == decision.possible == len(expected)
    assert len({tuple(step.run for step in order) for order in decision.orders}) == len(expected)


@given(histories(), st.integers(2, 3))
def test_a_limit_cuts_orders_and_is_not_hidden(observation: Observation, limit: int) -> None:
    every, some = (
        decide(observation),
        decide(Observation(observation.transactions, observation.preemptions, limit)),
    )
    assert some.orders == every.orders[:limit]
    assert some.possible == every.possible


def test_orders_that_are_not_counted_to_the_end_are_said() -> None:
    overlapping = tuple(Transaction(r, r, r, (), 0.0, 1000.0 + r, ("a",), ("a",)) for r in range(1, 200))
    decision = decide(Observation(overlapping, 2, 50))
    assert not decision.counted and len(decision.orders) == 50 < decision.possible
