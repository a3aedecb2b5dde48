"""Flower (`flwr`) in groups: a strategy around the user's own, and a mod around the user's own ClientApp.

    strategy = FedP2P(FedAvg(), groups=5)            # in the ServerApp
    app = ClientApp(mods=[peer_mod])                 # in the ClientApp

The strategy lets the one within it make its messages, puts their devices into groups by `decide`, and leaves
the arrays in the message of each group's leader alone. The mod brings the model to the other devices, calls
the app as if the server had sent it, and averages what all have trained; the leader's reply has the group's
mean, with the examples of the whole group, and the replies of the others have no arrays. The strategy within
aggregates the leaders' replies: by weight, as it would all of them.

A device says where it listens, and who it trusts, in its SuperNode's ``--node-config``: ``peer="HOST:PORT"``,
``peer-secret="FILE"`` and, to encrypt, ``peer-tls="CERTIFICATE,KEY,CA"``; ``peer-link`` (bytes/s) and
``peer-label`` serve grouping by bandwidth and by labels.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.edge.federated.live.exchange import ExchangeGroup, ExchangePeer, Mean
from windtunnel.edge.federated.policy import CAPABILITY, EdgeDevice, Observation, Settings, decide
from windtunnel.store.eventlog import EventLog

KEY = "windtunnel"
ADDRESS, SECRET, TLS, LINK, LABEL = "peer", "peer-secret", "peer-tls", "peer-link", "peer-label"
WHERE_SECONDS = 120.0
logger = logging.getLogger("windtunnel.federated")


class FedP2P(Strategy):
    """``strategy``: the one within. ``patience``: seconds in which a device must have trained; ``stall``:
    seconds without a byte after which a transfer has failed. ``log``: where decisions go, and what came of
    them. ``events``: a sentence for each device or group that was lost or refused."""

    def __init__(
        self, strategy: Strategy, *, groups: int, grouping: str = "random", exchange: str = "ring",
        seed: int = 0, patience: float = 600.0, stall: float = 10.0, log: EventLog | None = None,
    ) -> None:  # fmt: skip
        if groups < 1:
            raise UserError(f"`groups` {groups}; accepted are whole numbers from 1 up")
        self.strategy, self.seed, self.patience, self.stall = strategy, seed, patience, stall
        self.settings = Settings("fedp2p", groups=groups, grouping=grouping, exchange=exchange)
        self.examples = getattr(strategy, "weighted_by_key", "num-examples")
        self.log = log
        self.events: list[str] = []
        self._peers: dict[int, dict[str, Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self.strategy.configure_train(server_round, arrays, config, grid)
        return self._grouped(server_round, list(messages), grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return self._grouped(server_round, list(messages), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        leaders = []
        for reply in replies:
            if reply.has_error():
                self._tell(
                    f"round {server_round}: {self._name(reply.metadata.src_node_id)} ended with an error"
                )
                leaders.append(reply)
            elif KEY in reply.content:
                for kind, names in reply.content.pop(KEY).items():
                    for name in names:
                        self._tell(f"round {server_round}: {name} was {kind}")
                leaders.append(reply)
        if self.log is not None:
            means = sum(not reply.has_error() for reply in leaders)
            self.log.append("effect", round=server_round, means=means)
        return self.strategy.aggregate_train(server_round, leaders)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        logger.info("FedP2P in %s groups around:", self.settings.groups)
        self.strategy.summary()

    def _tell(self, sentence: str) -> None:
        self.events.append(sentence)
        logger.warning(sentence)

    def _name(self, node: int) -> str:
        return f"{node} at {self._peers[node][ADDRESS]}" if node in self._peers else str(node)

    def _grouped(self, server_round: int, messages: list[Message], grid: Grid) -> list[Message]:
        """The same messages, of which just the leaders' have the arrays."""
        if not messages:
            return []
        by_name = {self._name(node): node for node in self._listening(messages, grid)}
        own = {message.metadata.dst_node_id: message for message in messages}
        devices = tuple(
            EdgeDevice(
                name, float(self._peers[node].get(LINK, 1)), label=int(self._peers[node].get(LABEL, 0))
            )
            for name, node in by_name.items()
        )
        if not devices:
            raise UserError(
                f"no device said where it listens: --node-config '{ADDRESS}=\"HOST:PORT\"' in each"
            )
        observation = Observation(server_round, self.seed, devices, 0.0, 0.0, self.settings)
        decision = decide(observation)
        if self.log is not None:
            self.log.decision(CAPABILITY, "federated", observation, decision)
        grouped = []
        for number, names in enumerate(decision.groups):
            members = [(name, self._peers[by_name[name]][ADDRESS]) for name in names]
            for place, name in enumerate(names):
                message = own[by_name[name]]
                content = RecordDict(dict(message.content.items()))
                size = _without_arrays(content, keep=place == 0)
                fields = {
                    "label": f"{server_round} {number} {message.metadata.message_type}", "members": members,
                    "exchange": self.settings.exchange, "model": size, "patience": self.patience,
                    "stall": self.stall,
                }  # fmt: skip
                content[KEY] = ConfigRecord(
                    {"group": json.dumps(fields), "place": place, "examples": self.examples}
                )
                grouped.append(
                    Message(content, dst_node_id=by_name[name], message_type=message.metadata.message_type)
                )
        return grouped

    def _listening(self, messages: list[Message], grid: Grid) -> list[int]:
        """Ask devices that are new where they listen, by a message that the mod of training answers; those
        that have said so. The others are told of, and train in no group."""
        nodes = [message.metadata.dst_node_id for message in messages]
        new = [node for node in nodes if node not in self._peers]
        queries = [
            Message(
                RecordDict({KEY: ConfigRecord({"ask": "where"})}),
                dst_node_id=node,
                message_type=MessageType.TRAIN,
            )
            for node in new
        ]
        for reply in grid.send_and_receive(queries, timeout=WHERE_SECONDS) if queries else ():
            if not reply.has_error():
                self._peers[reply.metadata.src_node_id] = dict(reply.content[KEY])
        for node in new:
            if node not in self._peers:
                self._tell(
                    f"device {node} did not say where it listens: --node-config '{ADDRESS}=\"HOST:PORT\"'"
                )
        return [node for node in nodes if node in self._peers]


def peer_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """For ``ClientApp(mods=[peer_mod])``: messages of `FedP2P` are handled within the group, all others pass.

    Raises:
        UserError: the SuperNode's ``--node-config`` lacks what a peer needs.
        GroupFailed: the group has no mean in this round.
    """
    if KEY not in message.content:
        return call_next(message, context)
    own, config = message.content.pop(KEY), context.node_config
    if "ask" in own:
        peer_entry = {key: config[key] for key in (ADDRESS, LINK, LABEL) if key in config}
        if ADDRESS not in peer_entry:
            raise UserError(f'--node-config: {ADDRESS} is missing; accepted is {ADDRESS}="HOST:PORT"')
        return Message(RecordDict({KEY: ConfigRecord(peer_entry)}), reply_to=message)
    fields, place = json.loads(own["group"]), own["place"]
    group = ExchangeGroup(
        **{**fields, "members": tuple((name, address) for name, address in fields["members"])}
    )
    with ExchangePeer(group, place, _keys(config)) as peer:
        record = next(iter(message.content.array_records.items()), None)
        if place == 0:
            assert record is not None
            peer.model(_packed(*record))
        else:
            key, arrays = _unpacked(peer.model())
            message.content[key] = arrays
        reply = call_next(message, context)
        if message.metadata.message_type != MessageType.TRAIN or reply.has_error():
            return reply
        return _averaged(peer, reply, own["examples"])


def _averaged(peer: ExchangePeer, reply: Message, examples: str) -> Message:
    """The reply with the group's mean of arrays and metrics if this device leads, without arrays if not."""
    (key, arrays), (name, metrics) = (
        next(iter(records.items())) for records in (reply.content.array_records, reply.content.metric_records)
    )
    parts = [array.numpy() for array in arrays.values()]
    figures = [figure for figure in metrics if figure != examples and isinstance(metrics[figure], float)]
    narrow = all(part.dtype in (np.float16, np.float32) for part in parts)
    vector = np.concatenate(
        [*(part.ravel() for part in parts), np.array([metrics[figure] for figure in figures])]
    ).astype(np.float32 if narrow else np.float64)
    mean = peer.mean(vector, float(metrics[examples]))
    del reply.content[key]
    if peer.place == 0:
        reply.content[key] = _like(arrays, parts, mean.vector)
        own = dict(zip(figures, mean.vector[len(vector) - len(figures) :].tolist(), strict=True))
        reply.content[name] = MetricRecord({**metrics, **own, examples: mean.total})
        reply.content[KEY] = _left_out(mean)
    return reply


def _like(arrays: ArrayRecord, parts: list[NDArray[Any]], vector: NDArray[Any]) -> ArrayRecord:
    ends = np.cumsum([part.size for part in parts])
    pieces = np.split(vector[: ends[-1]], ends[:-1])
    return ArrayRecord(
        {
            key: Array(
                piece.reshape(part.shape).astype(part.dtype if part.dtype.kind == "f" else piece.dtype)
            )
            for key, part, piece in zip(arrays, parts, pieces, strict=True)
        }
    )


def _left_out(mean: Mean) -> ConfigRecord:
    return ConfigRecord({"lost": list(mean.lost), "refused, it is not finite": list(mean.refused)})


def _without_arrays(content: RecordDict, *, keep: bool) -> int:
    """Bytes of the one record of arrays as a group passes it on; it goes unless it is to be kept."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise UserError(f"a message of the strategy has {len(records)} records of arrays; accepted is one")
    if not keep:
        del content[records[0][0]]
    return len(_head(*records[0])) + sum(len(array.data) for array in records[0][1].values())


def _packed(key: str, arrays: ArrayRecord) -> bytes:
    """A record as a line of JSON and the arrays' raw bytes, as Flower has serialised them."""
    return b"".join([_head(key, arrays), *(array.data for array in arrays.values())])


def _head(key: str, arrays: ArrayRecord) -> bytes:
    fields = [
        [name, array.dtype, list(array.shape), array.stype, len(array.data)] for name, array in arrays.items()
    ]
    return json.dumps([key, fields]).encode() + b"\n"


def _unpacked(data: bytes) -> tuple[str, ArrayRecord]:
    line, _, rest = data.partition(b"\n")
    key, head = json.loads(line)
    arrays, at = {}, 0
    for name, dtype, shape, stype, size in head:
        arrays[name] = Array(dtype, tuple(shape), stype, rest[at : at + size])
        at += size
    return key, ArrayRecord(arrays)


def _keys(config: Any) -> Keys:
    if SECRET not in config:
        raise UserError(
            f"--node-config: {SECRET} is missing; accepted is the path of a file, the same secret in all"
        )
    return Keys.of_job(str(Path(config[SECRET])), str(config[TLS]).split(",") if TLS in config else ())
