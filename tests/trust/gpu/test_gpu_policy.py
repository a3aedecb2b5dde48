"""The rules of ownership, against a model that knows each page by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.trust.gpu.policy import Decision, Kind, Observation, Request, Table, decide, merged
from windtunnel.trust.gpu.twin import PAGE, cost, decisions

SIZE = 6
KINDS: tuple[Kind, ...] = ("bind", "claim", "register", "read", "write", "scrub", "release", "reset")
requests = st.builds(
    Request, st.sampled_from(KINDS), st.sampled_from(["b", "b", "c"]), st.sampled_from(["ann", "bob"]),
    st.integers(0, 2),
    st.tuples(st.integers(-1, SIZE), st.integers(-1, SIZE + 1)),
)  # fmt: skip


@dataclass
class Model:
    """Each page's state by itself; answers whether a request is allowed."""

    broker: str = ""
    owner: str = ""
    epoch: int = 0
    mine: set[int] = field(default_factory=set)
    dirty: set[int] = field(default_factory=set)

    def allowed(self, request: Request) -> bool:
        pages = set(range(*request.pages))
        inside = bool(pages) and pages <= set(range(SIZE))
        broker = request.broker == self.broker
        current = broker and bool(self.owner) and request.epoch == self.epoch
        owns = current and request.who == self.owner
        return {
            "bind": not self.broker,
            "claim": broker and not self.owner,
            "register": owns and inside and not pages & self.mine,
            "read": owns and inside and pages <= self.mine,
            "write": owns and inside and pages <= self.mine,
            "scrub": owns,
            "release": owns and not self.dirty,
            "reset": current,
        }[request.kind]

    def take(self, request: Request) -> None:
        pages = set(range(*request.pages))
        match request.kind:
            case "bind":
                self.broker = request.broker
            case "claim":
                self.owner, self.epoch = request.who, self.epoch + 1
            case "register":
                self.mine |= pages
            case "write":
                self.dirty |= pages
            case "scrub":
                self.dirty = set()
            case "release" | "reset":
                self.owner, self.mine, self.dirty = "", set(), set()


def pages_of(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {page for first, end in ranges for page in range(first, end)}


@given(st.lists(requests, max_size=40), st.lists(requests, max_size=40))
def test_what_is_allowed_is_what_a_model_of_single_pages_allows(
    head: list[Request], tail: list[Request]
) -> None:
    model = Model()
    begin = [Request("bind", "b"), Request("claim", "b", "ann"), Request("register", "b", "ann", 1, (1, 4))]
    sequence = [*head[:1], *begin, *tail]
    for request, decision in zip(sequence, decisions(SIZE, sequence), strict=True):
        before = set(model.dirty)
        assert (not decision.refusal) == model.allowed(request), (request, decision)
        if not decision.refusal:
            model.take(request)
            assert pages_of(decision.scrub) == (before if request.kind in ("scrub", "reset") else set())
        table = decision.table
        assert (table.broker, table.owner, table.epoch) == (model.broker, model.owner, model.epoch)
        assert (pages_of(table.pages), pages_of(table.dirty)) == (model.mine, model.dirty)
        assert table.pages == merged(table.pages) and table.dirty == merged(table.dirty)
        assert model.owner or not model.dirty, "nobody gets a device that is dirty"


OWNED = Table(8, "b", "ann", 3, ((0, 4),), ((1, 2),))


@pytest.mark.parametrize(
    ("table", "request_", "refusal"),
    [
        (OWNED, Request("bind", "c"), "bound"),
        (Table(8), Request("claim", "b", "ann"), "unbound"),
        (OWNED, Request("read", "c", "ann", 3, (0, 1)), "unbound"),
        (OWNED, Request("claim", "b", "bob"), "owned"),
        (OWNED, Request("claim", "b", "ann"), "owned"),
        (OWNED, Request("read", "b", "bob", 3, (0, 1)), "foreign"),
        (OWNED, Request("reset", "b", "", 2), "stale"),
        (OWNED, Request("read", "b", "ann", 2, (0, 1)), "stale"),
        (Table(8, "b", "", 3), Request("release", "b", "", 3), "stale"),
        (OWNED, Request("read", "b", "ann", 3, (3, 5)), "page"),
        (OWNED, Request("write", "b", "ann", 3, (7, 9)), "page"),
        (OWNED, Request("register", "b", "ann", 3, (3, 5)), "page"),
        (OWNED, Request("release", "b", "ann", 3), "unscrubbed"),
    ],
)
def test_refusals_have_a_name_a_reason_and_change_nothing(
    table: Table, request_: Request, refusal: str
) -> None:
    decision = decide(Observation(table, request_))
    assert decision == Decision(table, refusal) and decision.reason


def test_a_decision_costs_its_copies_and_what_is_scrubbed() -> None:
    def seconds(request: Request) -> float:
        observation = Observation(OWNED, request)
        return cost(observation, decide(observation))["seconds"]

    write = [seconds(Request("write", "b", "ann", 3, (0, pages))) for pages in (1, 3)]
    assert write[1] - write[0] == pytest.approx(2 * 2 * PAGE / 8e9)
    assert 0 < seconds(Request("scrub", "b", "ann", 3)) < write[0]
    observation = Observation(OWNED, Request("write", "b", "bob", 3, (0, 1)))
    assert cost(observation, decide(observation)) == {"seconds": 0.0, "refused": 1.0}
