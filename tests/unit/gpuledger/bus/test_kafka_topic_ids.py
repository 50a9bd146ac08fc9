"""Topic IDs, as brokers of any version return them."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaConnectionError

from gpuledger.bus.aiokafka_patches.requests import connected_node, fetch_topic_ids
from gpuledger.bus.kafka import KafkaBus
from gpuledger.settings import KafkaSettings

UNKNOWN_TOPIC, NO_ERROR = 3, 0


class Broker:
    """A client that knows one broker and its response."""

    def __init__(self, answer: Any, *, node: int | None = 1) -> None:  # noqa: ANN401  # aiokafka is untyped
        self._answer, self._node = answer, node
        self.nodes: list[int] = []

    def get_random_node(self) -> int | None:
        return self._node

    async def send(self, node: int, request: object) -> object:  # the client's method
        self.nodes.append(node)
        if isinstance(self._answer, Exception):
            raise self._answer
        topics = [(*topic, False, [], "what else there is") for topic in self._answer]
        return SimpleNamespace(topics=topics)


async def test_a_topic_id_has_the_form_that_kafkas_tools_print() -> None:
    broker = Broker(
        [
            (NO_ERROR, "events", bytes(range(16))),
            (NO_ERROR, "old", bytes(16)),
            (UNKNOWN_TOPIC, "gone", bytes(16)),
        ]
    )
    assert await fetch_topic_ids(broker, ["events", "old", "gone"]) == {
        "events": "AAECAwQFBgcICQoLDA0ODw",
        "old": None,
    }


async def test_brokers_that_do_not_support_topic_ids_return_none() -> None:
    old = Broker(NotImplementedError("Support for _TopicMetadata v5 has not yet been added"))
    assert await fetch_topic_ids(old, ["events"]) is None


async def test_a_missing_broker_is_an_error() -> None:
    with pytest.raises(KafkaConnectionError):
        await fetch_topic_ids(Broker([], node=None), ["events"])


DEFAULT, COORDINATION = ConnectionGroup.DEFAULT, ConnectionGroup.COORDINATION


@pytest.mark.parametrize(
    ("connections", "node"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({(7, DEFAULT): True}, 7, id="one"),
        pytest.param({(7, DEFAULT): False, (8, DEFAULT): True}, 8, id="one was closed"),
        pytest.param({(7, COORDINATION): True}, None, id="only for a group"),
    ],
)
def test_a_broker_is_connected_if_its_connection_for_general_requests_is_open(
    connections: dict[tuple[int, int], bool], node: int | None
) -> None:
    opened = {key: SimpleNamespace(connected=lambda it=it: it) for key, it in connections.items()}
    assert connected_node(SimpleNamespace(_conns=opened)) == node


async def test_a_request_goes_to_the_given_broker() -> None:
    broker = Broker([], node=1)
    await fetch_topic_ids(broker, ["events"], node=7)
    await fetch_topic_ids(broker, ["events"])
    assert broker.nodes == [7, 1]


async def test_a_bus_without_an_open_producer_opens_no_connection_for_an_id() -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers="nowhere.invalid:9092"))
    assert await bus.topic_id("events") is None
    async with bus.producer():
        assert await bus.topic_id("events") is None
