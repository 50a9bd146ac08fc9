"""Topic IDs, as brokers of any version return them."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from gpuledger.bus.aiokafka_patches.requests import fetch_topic_ids

UNKNOWN_TOPIC, NO_ERROR = 3, 0


class Broker:
    """A client that knows one broker and its response."""

    def __init__(self, answer: Any, *, node: int | None = 1) -> None:  # noqa: ANN401  # aiokafka is untyped
        self._answer, self._node = answer, node

    def get_random_node(self) -> int | None:
        return self._node

    async def send(self, node: int, request: object) -> object:  # the client's method
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
    old = Broker(NotImplementedError("Support for _TopicIds v5 has not yet been added"))
    assert await fetch_topic_ids(old, ["events"]) is None


async def test_a_missing_broker_is_an_error() -> None:
    with pytest.raises(KafkaConnectionError):
        await fetch_topic_ids(Broker([], node=None), ["events"])
