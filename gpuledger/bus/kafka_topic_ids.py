"""Asks brokers for the identity of a topic: it tells one made anew from the one before.

aiokafka 0.14 speaks Metadata up to version 5; identities come with version 10 (Kafka 2.8).
"""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, ClassVar, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, UnknownTopicOrPartitionError
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from gpuledger.bus.protocol import is_other_topic

_NOTHING: Final = bytes(16)
"""The identity of a topic that has none: its brokers were never told to give it one."""


class Uuid(AbstractType[bytes]):  # type: ignore[misc]  # aiokafka is untyped
    """The sixteen bytes of an identity."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        """Return the bytes as they are sent."""
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        """Return the bytes that come next."""
        return data.read(len(_NOTHING))


class _MetadataResponse(Response):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString()),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _MetadataRequest(RequestStruct):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION: ClassVar[bool] = True
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", Uuid), ("name", CompactString()), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _TopicIds(Request[_MetadataRequest]):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = 3

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[Any]) -> Any:  # noqa: ANN401  # aiokafka is untyped
        tags: dict[int, bytes] = {}
        wanted = [(_NOTHING, topic, tags) for topic in self._topics]
        make_topics = with_cluster_rights = with_topic_rights = False
        return request_struct_class(
            wanted, make_topics, with_cluster_rights, with_topic_rights, tags
        )


async def fetch_topic_ids(
    client: AIOKafkaClient, topics: Sequence[str]
) -> dict[str, str | None] | None:
    """Return the identity of each topic that exists, as `kafka-topics.sh --describe` shows it.

    `None` in the place of an identity where the topic has none; `None` in the place of all where
    the brokers are older than Kafka 2.8 and cannot be asked. Raises aiokafka's errors.
    """
    node = client.get_random_node()
    if node is None:
        raise KafkaConnectionError("no broker is known")
    try:
        answer = await client.send(node, _TopicIds(topics))
    except NotImplementedError:  # what aiokafka says where a broker lacks the version
        return None
    return {
        name: None if identity == _NOTHING else _shown(identity)
        for error_code, name, identity, *_ in answer.topics
        if error_code != UnknownTopicOrPartitionError.errno and identity is not None
    }


def _shown(identity: bytes) -> str:
    return base64.urlsafe_b64encode(identity).decode().rstrip("=")


# The identities of the topics that are read, and which of them are of other topics by now. Pure.
#
# Brokers before Kafka 2.8 cannot be asked for identities, and some topics have none: what is not
# known is no other topic. It is taken over when it becomes known, as at an upgrade of the brokers.

Found = Mapping[str, str | None]
"""The identity of each topic that exists; `None` for a topic that has none."""


class TopicIds:
    """What was known of the topics when partitions were assigned, and has become known since."""

    def __init__(self, found: Found | None) -> None:
        """Take what the brokers answered; `None` where they cannot be asked."""
        self.by_topic: dict[str, str | None] = dict(found or {})
        self._could_ask = found is not None

    def update(self, found: Found) -> frozenset[str]:
        """Return the topics that are others now; where there are none, take over what is new.

        A topic that was absent is another one as well, also without an identity.
        """
        others = frozenset(topic for topic in found if self._is_other(topic, found[topic]))
        if not others:
            self.by_topic |= {
                topic: own or self.by_topic.get(topic) for topic, own in found.items()
            }
            self._could_ask = True
        return others

    def _is_other(self, topic: str, topic_id: str | None) -> bool:
        if topic not in self.by_topic:
            return self._could_ask
        return is_other_topic(self.by_topic[topic], topic_id)
