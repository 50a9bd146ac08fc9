"""What aiokafka 0.14 does not ask of brokers: stable offsets, refusals of them, topics' identities.

**What a group has committed.** aiokafka speaks OffsetFetch up to version 3, and takes two answers
for more than they are:

- A coordinator that has lost the group, or still reads it, refuses once for the whole answer, which
  names no partitions then. aiokafka looks at those alone, and would take the refusal for "nothing
  is committed": everything would be read from its beginning.
- A coordinator answers version 3 with what it has at that moment. One that has just taken the group
  over has the commits in its log, and may not know yet that they count (its high watermark lags);
  the same holds while the offsets of a transaction are written. A worker that goes on from such an
  answer makes once more what was made already. From version 7 on (Kafka 2.5, KIP-447) a request may
  ask for stable offsets: those that nothing under way will move. Brokers older than that are asked
  as aiokafka asks them.

Stable offsets are asked for where a partition was taken over, that is behind the opening of its
transactional id, which ends what another one had under way. Before that the answer would be late
by the transaction of a worker that was killed, until the brokers abort it.

**Which topic it is.** Its identity tells one made anew from the one before. aiokafka speaks
Metadata up to version 5; identities come with version 10 (Kafka 2.8).
"""

import base64
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from io import BytesIO
from typing import Any, ClassVar, Final, TypeAlias

from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaConnectionError,
    KafkaError,
    NotCoordinatorForGroupError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import (
    OffsetFetchRequest,
    OffsetFetchRequest_v3,
    OffsetFetchResponse_v3,
)
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

UNSTABLE_OFFSET_COMMIT: Final = 88
"""What a coordinator says of a partition whose offset an open transaction is about to move."""
_STABLE_VERSION: Final = 7
_COORDINATOR_LEFT: Final = (NotCoordinatorForGroupError, GroupCoordinatorNotAvailableError)

_Send: TypeAlias = Callable[..., Awaitable[Any]]
_requires_stable: Final = ContextVar("requires_stable", default=False)
"""How `stable_offsets` reaches the request, which aiokafka makes in the same task."""


class _StableResponse(Response):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = OffsetFetchResponse_v3.API_KEY
    API_VERSION = _STABLE_VERSION
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString()),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString()),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class _StableRequest(RequestStruct):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = OffsetFetchResponse_v3.API_KEY
    API_VERSION = _STABLE_VERSION
    FLEXIBLE_VERSION: ClassVar[bool] = True
    RESPONSE_TYPE = _StableResponse
    SCHEMA = Schema(
        ("consumer_group", CompactString()),
        (
            "topics",
            CompactArray(
                ("topic", CompactString()),
                ("partitions", CompactArray(Int32)),
                ("tags", TaggedFields),
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class _StableOffsets(Request[OffsetFetchRequest_v3 | _StableRequest]):  # type: ignore[misc]  # aiokafka is untyped
    """Asks as well as the broker can be asked."""

    API_KEY = OffsetFetchResponse_v3.API_KEY

    def __init__(self, group: str, partitions: Sequence[tuple[str, list[int]]]) -> None:
        self._group = group
        self._partitions = partitions

    def build(self, request_struct_class: type[Any]) -> Any:  # noqa: ANN401  # aiokafka is untyped
        if request_struct_class is not _StableRequest:
            return request_struct_class(self._group, self._partitions)
        tags: dict[int, bytes] = {}
        topics = [(topic, numbers, tags) for topic, numbers in self._partitions]
        require_stable = True
        return _StableRequest(self._group, topics, require_stable, tags)


async def committed_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, str]]:
    """Return the committed offsets with their metadata, which `committed` leaves out.

    Can go once `committed` returns the metadata.
    """
    found: dict[Any, tuple[int, str]] = await client._coordinator.fetch_committed_offsets(
        list(partitions)
    )
    return found


async def stable_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, str]]:
    """Return the same as soon as nothing that is under way will move them.

    Can go once aiokafka asks for stable offsets (OffsetFetch from version 7 on, KIP-447).
    """
    requesting = _requires_stable.set(True)
    try:
        return await committed_offsets(client, partitions)
    finally:
        _requires_stable.reset(requesting)


def heed_refused_offsets(client: AIOKafkaConsumer) -> None:
    """Have the consumer ask again where the coordinator refuses to say what is committed.

    Can go once aiokafka looks at the error of an answer as a whole.
    """
    coordinator = client._coordinator

    def find_another(error: KafkaError) -> None:
        if isinstance(error, _COORDINATOR_LEFT):
            coordinator.coordinator_dead()

    coordinator._send_req = _heeding(coordinator._send_req, on_refusal=find_another)


def _heeding(send: _Send, *, on_refusal: Callable[[KafkaError], None]) -> _Send:
    """Return a way to send requests that looks at the answers on a group's offsets."""

    async def send_and_check(request: Any, *arguments: Any) -> Any:  # noqa: ANN401  # aiokafka is untyped
        # All other requests go as they are: this is the way of all of them.
        if not isinstance(request, OffsetFetchRequest):
            return await send(request, *arguments)
        if _requires_stable.get():
            request = _StableOffsets(request._consumer_group, request._partitions)
        answer = await send(request, *arguments)
        if (error := _refusal_of(answer)) is not None:
            on_refusal(error)
            raise error
        return _as_aiokafka_reads_it(answer)

    return send_and_check


def _refusal_of(answer: Any) -> KafkaError | None:  # noqa: ANN401  # aiokafka is untyped
    """Return why this is no answer; aiokafka asks again where the error is retriable."""
    # Of the answer as a whole, which names no partition then.
    if answer.error_code:
        refusal: KafkaError = for_code(answer.error_code)()
        return refusal
    if answer.API_VERSION == _STABLE_VERSION and any(
        code == UNSTABLE_OFFSET_COMMIT
        for _, partitions, _ in answer.topics
        for *_, code, _ in partitions
    ):
        # A code that aiokafka does not know, in the place of one after which it asks again.
        return GroupLoadInProgressError("a transaction is about to move the offset")
    return None


def _as_aiokafka_reads_it(answer: Any) -> Any:  # noqa: ANN401  # aiokafka is untyped
    if answer.API_VERSION != _STABLE_VERSION:
        return answer
    topics = [
        (
            topic,
            [
                (partition, offset, metadata or "", code)
                for partition, offset, _, metadata, code, _ in partitions
            ],
        )
        for topic, partitions, _ in answer.topics
    ]
    return OffsetFetchResponse_v3(answer.throttle_time_ms, topics, answer.error_code)


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
    the brokers are older than Kafka 2.8 and cannot be asked. Raises aiokafka's errors. Can go once
    aiokafka speaks Metadata in version 10.
    """
    # Any broker knows; one that is behind is asked again by the next look.
    node = client.get_random_node()
    if node is None:
        raise KafkaConnectionError("no broker is known")
    try:
        answer = await client.send(node, _TopicIds(topics))
    except NotImplementedError:  # what aiokafka says where a broker lacks the version
        return None
    return {
        name: None
        if identity == _NOTHING
        else base64.urlsafe_b64encode(identity).decode().rstrip("=")
        for error_code, name, identity, *_ in answer.topics
        if error_code != UnknownTopicOrPartitionError.errno and identity is not None
    }
