"""An agent that knows of no journal pays through the proxy, and pays once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_model import FakeModel, Plan
from fake_turns import FakeBox
from model_bench import Bench, chat

from windtunnel.agents.sandbox.live.effects import Journal
from windtunnel.agents.sandbox.live.model_proxy import EffectService, ModelProxy
from windtunnel.base.errors import UserError


@pytest.fixture
def service() -> Iterator[FakeModel]:
    """Any service will do: this one numbers its answers and counts calls."""
    made = FakeModel()
    yield made
    made.close()


@pytest.fixture
def journal(bench: Bench) -> Iterator[Journal]:
    with Journal(bench.home.path / "effects.sqlite") as made:
        yield made


class Payer:
    """An agent whose turns end by asking its model, and who pays in between."""

    def __init__(self, bench: Bench, journal: Journal, service: FakeModel, **options: Any) -> None:
        self.bench = bench
        self.proxy: ModelProxy = bench.proxy(journal=journal)
        self.box = FakeBox()
        self.services = {"bank": EffectService(service.url, {"Authorization": "Bearer real"}, **options)}
        bench.serve(self.proxy, self.box, services=self.services)

    def pay(self, amount: int, box: FakeBox | None = None, **headers: str) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=60) as client:
            url = self.bench.url(box or self.box, "/effects/bank/v1/charges?live=1")
            return client.post(url, json={"amount": amount}, headers=headers)

    def end_turn(self) -> None:
        self.bench.ask(self.box, chat(f"turn {self.box.turns + 1}")).reply()

    def back_to(self, turn: int, *, on_purpose: bool = False) -> None:
        (self.proxy.rolled_back if on_purpose else self.proxy.restored)(self.box.name, turn)
        self.box.back_to(turn)


@pytest.fixture
def payer(bench: Bench, journal: Journal, service: FakeModel) -> Payer:
    return Payer(bench, journal, service)


@pytest.mark.parametrize("on_purpose", [False, True])
def test_payment_made_again_after_a_restore_is_answered_from_the_journal(
    payer: Payer, service: FakeModel, on_purpose: bool
) -> None:
    payer.end_turn()
    first = payer.pay(5)
    payer.end_turn()
    payer.back_to(1, on_purpose=on_purpose)
    again = payer.pay(5)
    assert again.content == first.content
    assert len(service.calls) == 1
    call = service.calls[0]
    assert call.path == "/v1/charges?live=1"
    assert call.headers["authorization"] == "Bearer real"
    assert call.headers["idempotency-key"].startswith("windtunnel-")


def test_same_payment_meant_twice_is_made_twice_and_replayed_in_order(
    payer: Payer, service: FakeModel
) -> None:
    payer.end_turn()
    first = payer.pay(5).content
    payer.end_turn()
    second = payer.pay(5).content
    payer.end_turn()
    assert first != second
    assert len({call.headers["idempotency-key"] for call in service.calls}) == 2
    payer.back_to(2)
    assert payer.pay(5).content == second, "the first was before the checkpoint"
    payer.back_to(1)
    assert [payer.pay(5).content for _ in range(2)] == [first, second]
    assert len(service.calls) == 2
    assert payer.pay(5).content not in (first, second), "and a third time is new"


def test_own_key_of_the_agent_names_the_effect(payer: Payer, service: FakeModel) -> None:
    key = {"Idempotency-Key": "order-1"}
    assert payer.pay(5, **key).content == payer.pay(6, **key).content
    assert len(service.calls) == 1


def test_answer_that_was_not_received_is_given_again(payer: Payer, service: FakeModel) -> None:
    service.plan.answer.clear()
    lost = payer.bench.ask(payer.box, {"amount": 5}, "/effects/bank/v1/charges?live=1")
    service.wait_for(1)
    payer.back_to(0)
    service.plan.answer.set()
    reply = payer.pay(5)
    assert reply.content == lost.reply()
    assert len(service.calls) == 1


def test_refusal_is_passed_on_and_may_be_tried_again(payer: Payer, service: FakeModel) -> None:
    service.plan.status = 402
    assert payer.pay(5).status_code == 402
    service.plan.status = 200
    assert payer.pay(5).status_code == 200
    assert len(service.calls) == 2


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_doubt(bench: Bench, journal: Journal, service: FakeModel, idempotent: bool, broken: bool) -> None:
    payer = Payer(bench, journal, service, idempotent=idempotent)
    service.plan = Plan(status=500, break_after=0 if broken else None)
    service.plan.answer.set()
    assert payer.pay(5).status_code == (502 if broken else 500)
    service.plan = Plan()
    service.plan.answer.set()
    again = payer.pay(5)
    if idempotent:
        assert again.status_code == 200
        assert len({call.headers["idempotency-key"] for call in service.calls}) == 1
    else:
        assert again.status_code == 409
        assert "may have happened" in again.json()["error"]["message"]
        assert len(service.calls) == 1


def test_service_that_cannot_be_reached_did_nothing(
    bench: Bench, journal: Journal, service: FakeModel
) -> None:
    payer = Payer(bench, journal, service)
    proxy = payer.proxy
    proxy.forget("one")
    bench.serve(proxy, payer.box, services={"bank": EffectService("http://127.0.0.1:9")})
    assert payer.pay(5).status_code == 502
    assert [effect.state for effect in journal.effects("one")] == ["failed"]


def test_forks_pay_for_themselves_and_share_what_was_before(payer: Payer, service: FakeModel) -> None:
    before = payer.pay(1).content
    payer.end_turn()
    after = payer.pay(2).content
    fork = FakeBox("fork")
    fork.back_to(1)
    payer.proxy.forked("one", "fork", 1)
    payer.bench.serve(payer.proxy, fork, services=payer.services)
    assert payer.pay(2, fork).content != after
    assert len(service.calls) == 3
    payer.proxy.restored("fork", 0)
    assert payer.pay(1, fork).content == before
    assert len(service.calls) == 3


def test_reading_is_no_effect_and_other_services_are_unknown(
    payer: Payer, service: FakeModel, journal: Journal
) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        for _ in range(2):
            assert client.get(payer.bench.url(payer.box, "/effects/bank/v1/balance")).status_code == 200
        unknown = client.post(payer.bench.url(payer.box, "/effects/shop/buy"))
    assert len(service.calls) == 2
    assert unknown.status_code == 404
    assert "declared: bank" in json.loads(unknown.content)["error"]["message"]
    assert journal.effects("one") == []


def test_turn_of_an_effect_and_restart_of_the_proxy(
    payer: Payer, service: FakeModel, journal: Journal
) -> None:
    payer.end_turn()
    first = payer.pay(5).content
    payer.end_turn()
    assert [effect.turn for effect in journal.effects("one")] == [2]
    payer.proxy.close()
    payer.bench.proxies.remove(payer.proxy)
    payer.proxy = payer.bench.proxy(journal=journal)
    payer.proxy.restored("one", 1)
    payer.bench.serve(payer.proxy, payer.box, services=payer.services)
    assert payer.pay(5).content == first
    assert len(service.calls) == 1


def test_services_need_a_journal_and_a_plain_name(bench: Bench, payer: Payer) -> None:
    with pytest.raises(UserError, match="need a journal"):
        bench.proxy().serve(FakeBox("two"), "http://x", services=payer.services)
    with pytest.raises(UserError, match="service 'a/b' is not accepted"):
        payer.proxy.serve(FakeBox("two"), "http://x", services={"a/b": EffectService("http://x")})
