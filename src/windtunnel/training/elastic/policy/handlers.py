"""What agents say to the supervisor, and what of it is believed.

A message counts only if it comes over the connection of a host that is there, carries the present
generation, and is about a rank of that host; whatever else still runs somewhere is not heard.
"""

from __future__ import annotations

from typing import Any

from windtunnel.training.elastic.events import unsound
from windtunnel.training.elastic.policy.checkpoints import RECORD, STORING
from windtunnel.training.elastic.policy.core import Core, Message
from windtunnel.training.elastic.policy.state import DURABLE, LiveHost

# Those by which a process usually ends, with their numbers on Linux: a policy imports nothing of processes.
SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM", 24: "SIGXCPU", 31: "SIGSYS",
}  # fmt: skip
LARGEST_DURABLE = 64 << 10
"""Bytes of values of a durable agreement that the log takes; of larger ones it keeps only that they are."""


def hello(core: Core, link: int, message: Message, now: float) -> None:
    """An agent on a new connection: a new host, one that comes back, or one that was given up."""
    id, generation = message.get("host"), int(message.get("generation", 0))
    address, memory = str(message["address"]), str(message["memory"])
    domain, pid = str(message.get("domain", "")), int(message["pid"])
    workers = {int(rank): pid for rank, pid in message.get("workers", {}).items()}
    if core.outcome is not None:
        core.end(link, core.outcome.status, core.outcome.reason)
        return
    if int(message.get("epoch", 0)) > core.epoch:
        core.effects.drop(link)  # it hears nobody who follows an older log
        return
    if id is None:
        count = len(core.hosts.live)
        host = core.hosts.join(address, memory, domain, pid, link, now)
        if len(core.hosts.live) > count:
            core.record(
                "host.joined", host=host.member.id, place=None, address=address, memory=memory,
                domain=domain, pid=pid,
            )  # fmt: skip
            core.change(now)
        _welcome(core, host)
        if core.place_of(host) is not None:
            core.tell(host)
        return
    attending = core.hosts.live.get(int(id))
    if attending is None or attending.pid != pid:
        core.end(link, 1, f"host {id} was given up; it may come again as a new one")
        return
    if attending.link is not None:
        core.effects.drop(attending.link)
    core.hosts.attach(attending, link, now)
    _back(core, attending, generation, workers, now)
    if message.get("met"):
        core.meet(generation, message["met"])
    for post in message.get("posts", []):
        _post(core, attending, post, now)


def message(core: Core, link: int, message: Message, now: float) -> Any:
    """Anything else that an agent says; the answer, where it asks."""
    host = core.hosts.of_link(link)
    if host is None or core.outcome is not None:
        return None
    core.hosts.renew(host, now)
    match message["op"]:
        case "post":
            _post(core, host, message, now)
        case "meet":
            core.meet(message["generation"], message["said"])
        case "compare-set":
            return _compare_set(core, message)
        case "ask":
            return _answer(core, str(message["key"]))
        case "event":
            _event(core, host, message)
        case "worker":
            _worker(core, host, message, now)
        case "suspect":
            _suspect(core, host, message, now)
        case "reached":
            if core.round is not None and message["round"] == core.round.number:
                core.round.answers[host.member.id] = tuple(message["silent"])
        case "kill-launcher":
            if int(message["epoch"]) == core.epoch:
                core.effects.kill_launcher()
        case "done":
            if _mine(core, host, message):
                core.is_done(int(message["rank"]), message.get("result"), now)
    return None


def closed(core: Core, link: int, now: float) -> None:
    """A connection is gone."""
    host = core.hosts.of_link(link)
    if host is not None:
        core.hosts.detach(host, now)


def _back(core: Core, host: LiveHost, generation: int, workers: dict[int, int | None], now: float) -> None:
    """A host is connected again: what it missed, and what became of its workers meanwhile."""
    host.workers = workers
    _welcome(core, host)
    membership, place = core.membership, core.place_of(host)
    if membership is None:
        return
    if generation != core.generation:
        if membership.epoch == core.epoch:
            core.tell(host)
        elif place is not None:
            # agents refuse what an earlier supervisor decided, and others may be in that generation
            core.force("the supervisor was started again in the middle of a recovery", now)
        return
    core.tell_met(host, core.met)
    for rank in core.ranks(place) if place is not None else ():
        if rank in core.lost and rank in workers:
            core.fence(host, rank, workers[rank])
        elif rank not in workers and rank not in core.done and rank not in core.lost:
            host.unseen[rank] = now + core.settings.deadlines.suspect


def _worker(core: Core, host: LiveHost, message: Message, now: float) -> None:
    rank, pid, what = int(message["rank"]), message.get("pid"), message["what"]
    if not _mine(core, host, message) or pid in host.fenced:
        return
    host.unseen.pop(rank, None)
    if what == "started":
        core.started(host, rank, pid, now)
        return
    if what == "frozen":
        error = message.get("error") or "it does not move"
        core.fence(host, rank, pid)
        core.worker_lost(host, rank, "frozen", error, False, now)
        return
    status, killed = message.get("status"), message.get("signal")
    if status == 0 and not killed:
        core.is_done(rank, core.done.get(rank), now)
        return
    if killed:
        words = f"killed by {SIGNALS.get(killed, f'signal {killed}')}"
    else:  # without a status: the fork server, which could have told, is gone as well
        words = "it ended" if status is None else f"ended with status {status}"
    error = str(message.get("error") or "")
    less = bool(message.get("less"))
    core.worker_ended(host, rank, None if killed else status, words, error, now, less)


def _suspect(core: Core, host: LiveHost, message: Message, now: float) -> None:
    rank = int(message["rank"])
    if not _mine(core, host, message) or rank in core.suspects:
        return
    core.cooperative = True
    core.record("suspected", rank=rank, error=str(message.get("error", "")))
    if core.suspected is None:
        core.suspected = now


def _event(core: Core, host: LiveHost, message: Message) -> None:
    fields = {key: value for key, value in message.items() if key not in ("op", "epoch")}
    kind, t = str(fields.pop("kind")), fields.pop("t", None)
    generation = fields.pop("generation", core.generation)
    stamped = type(generation) is int and generation >= 0 and (t is None or isinstance(t, int | float))
    if not stamped or "self" in fields or unsound(kind, fields):
        return
    if kind == "grouped":
        if not _mine(core, host, {**message, "generation": generation}):
            return
        core.cooperative = True
    elif kind == "persisted":
        _persisted(core, host, fields)
        return
    elif kind == "step" and generation == core.generation:
        core.stepped(int(fields["step"]))
    fields.setdefault("host", host.member.id)
    core.record(kind, generation, t, **fields)


def _post(core: Core, host: LiveHost, message: Message, now: float) -> None:
    """What ranks of a host say to an agreement: all of them at once, but where their agent comes back."""
    generation, key = int(message["generation"]), str(message["key"])
    if core.place_of(host) is None or host.link is None:
        return
    core.cooperative = True
    values = core.agreements.decided(generation, key)
    if values is not None:  # it was decided while this agent was away
        core.send(host.link, _decided(generation, key, values))
        return
    complete = False
    for rank, value in message["values"].items():
        complete |= core.agreements.post(generation, key, int(rank), value)
    if complete:
        values = core.agreements.complete(key)
        if key.startswith(DURABLE):
            small = len(repr(values)) <= LARGEST_DURABLE
            core.record("agreed", key=key, values=values if small else dict.fromkeys(values))
        committed = core.checkpoints.sealed(key, values)
        if committed is not None:
            core.record("committed", **committed)
        core.agreements.seal(key)
        for other in core.hosts.live.values():
            if other.link is not None:
                core.send(other.link, _decided(generation, key, values))


def _compare_set(core: Core, message: Message) -> tuple[bool, str] | None:
    """See `Supervision.compare_set`."""
    if message["generation"] != core.generation:
        return None
    key, so = message["key"], core.met.get(message["key"], "") == message["expected"]
    if so:
        core.meet(message["generation"], {key: message["desired"]})
    return so, core.met.get(key, "")


def _answer(core: Core, key: str) -> dict[int, Any] | None:
    step = key.removeprefix(STORING)
    if key == RECORD:
        return {0: core.checkpoints.plain()}
    if step != key and step.isdigit():
        return {0: core.checkpoints.stored(int(step))}
    return core.agreements.ask(key)


def _persisted(core: Core, host: LiveHost, fields: Message) -> None:
    """A manifest is in storage. Believed of the place that completes steps, once, where all ranks' shards are
    known to be there."""
    if core.place_of(host) != 0 or not core.checkpoints.written(str(fields.pop("key", ""))):
        return
    at, check = (int(fields["step"]), int(fields["course"])), str(fields["check"])
    if core.checkpoints.persisted.get(at) == check:
        return  # said again to a supervisor that the one before had told by the log
    core.record("persisted", step=at[0], course=at[1], check=check, url=str(fields.get("url", "")))


def _welcome(core: Core, host: LiveHost) -> None:
    settings = core.settings
    assert host.link is not None
    welcome = {"op": "welcome", "host": host.member.id, "beat": settings.beat, "lease": settings.lease}
    core.send(host.link, welcome)


def _mine(core: Core, host: LiveHost, message: Message) -> bool:
    """Whether a message is of this generation, and about a rank of the host that sent it."""
    place, rank = core.place_of(host), int(message["rank"])
    return place is not None and int(message["generation"]) == core.generation and rank in core.ranks(place)


def _decided(generation: int, key: str, values: dict[int, Any]) -> Message:
    return {"op": "decided", "generation": generation, "key": key, "values": values}
