"""Requests that aiokafka 0.14 lacks: stable committed offsets, their errors, topic ids and rights.

**Committed offsets.** aiokafka supports OffsetFetch up to version 3, and misreads two answers:

- A coordinator that has lost the group, or is still loading it, answers with one error for the
  whole response and without partitions. aiokafka only checks the partitions' errors, so it would
  conclude that nothing is committed, and everything would be read from the beginning.
- In version 3, a coordinator answers with its current offsets, which may be out of date. A
  coordinator that has just taken over the group has the commits in its log, but may not yet
  consider them committed (its high watermark lags). The offsets are also out of date while a
  transaction's offsets are still being written. A worker that continues from such an answer
  repeats work. From version 7 on (Kafka 2.5, KIP-447), a request can require stable offsets,
  which no pending commit will change. Older brokers receive aiokafka's request.

Stable offsets are requested after a partition was taken over, that is, after its transactional id
was opened, which ends the previous owner's transaction. Before that, the answer would be delayed by
the open transaction of a killed worker until the brokers abort it.

**Topic ids and rights.** A topic's id distinguishes a recreated topic from its predecessor. The
brokers can also report which operations on a topic are allowed to the user. aiokafka supports
Metadata up to version 5; ids were added in version 10 (Kafka 2.8).
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from io import BytesIO
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaConnectionError,
    KafkaError,
    NotCoordinatorForGroupError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
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

from gpuledger.bus.aiokafka_patches.coordinators import ANSWER_SECONDS, leave_coordinator

UNSTABLE_OFFSET_COMMIT: Final = 88
"""Error code of a partition whose committed offset an open transaction is about to change."""
_STABLE_VERSION: Final = 7
_COORDINATOR_LEFT: Final = (NotCoordinatorForGroupError, GroupCoordinatorNotAvailableError)

_Send: TypeAlias = Callable[..., Awaitable[Any]]
_on_pending: Final[ContextVar[Callable[[], None] | None]] = ContextVar("on_pending", default=None)
"""Set while `stable_offsets` waits; aiokafka sends its request in the same task."""


class _PendingOffsetError(GroupLoadInProgressError):  # type: ignore[misc]  # aiokafka is untyped
    """A transaction is about to change the offset.

    aiokafka does not know this broker error, but it knows the base class and therefore repeats the
    request.
    """


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
    """A request for committed offsets, which must be stable if the broker supports that."""

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
    """Return each partition's committed offset and its metadata, which `committed` omits.

    Remove once `committed` returns the metadata.
    """
    found: dict[Any, tuple[int, str]] = await client._coordinator.fetch_committed_offsets(
        list(partitions)
    )
    return found


async def stable_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any], *, on_pending: Callable[[], None]
) -> dict[Any, tuple[int, str]]:
    """Wait until no pending transaction can change the committed offsets, then return them.

    Calls `on_pending` for each response that reports a pending transaction.

    Remove once aiokafka requests stable offsets (OffsetFetch from version 7 on, KIP-447).
    """
    waiting = _on_pending.set(on_pending)
    try:
        return await committed_offsets(client, partitions)
    finally:
        _on_pending.reset(waiting)


def heed_refused_offsets(
    client: AIOKafkaConsumer, *, answer_seconds: float = ANSWER_SECONDS
) -> None:
    """Make the consumer retry if the coordinator rejects a request for committed offsets.

    If the coordinator does not answer within `answer_seconds`, it is looked up again. Remove once
    aiokafka checks the response's top-level error code, and accepts a timeout.
    """
    coordinator = client._coordinator

    def find_another(error: KafkaError) -> None:
        if isinstance(error, _COORDINATOR_LEFT):
            coordinator.coordinator_dead()

    coordinator._send_req = _heeding(
        coordinator._send_req,
        on_refusal=find_another,
        on_silence=lambda: leave_coordinator(client),
        answer_seconds=answer_seconds,
    )


def _heeding(
    send: _Send,
    *,
    on_refusal: Callable[[KafkaError], None],
    on_silence: Callable[[], None],
    answer_seconds: float,
) -> _Send:
    """Wrap `send` so that responses with committed offsets are checked for errors.

    Calls `on_silence` if such a response does not come within `answer_seconds`.
    """

    async def send_and_check(request: Any, *arguments: Any) -> Any:  # noqa: ANN401  # aiokafka is untyped
        # aiokafka sends all requests to the coordinator with this function; only requests for
        # committed offsets are checked.
        if not isinstance(request, OffsetFetchRequest):
            return await send(request, *arguments)
        if on_pending := _on_pending.get():
            request = _StableOffsets(request._consumer_group, request._partitions)
        try:
            async with asyncio.timeout(answer_seconds):
                answer = await send(request, *arguments)
        except TimeoutError as silence:
            on_silence()
            raise RequestTimedOutError from silence
        if (error := _refusal_of(answer)) is not None:
            on_refusal(error)
            if on_pending and isinstance(error, _PendingOffsetError):
                on_pending()
            raise error
        return _as_aiokafka_reads_it(answer)

    return send_and_check


def _refusal_of(answer: Any) -> KafkaError | None:  # noqa: ANN401  # aiokafka is untyped
    """Return the error in a response, or `None`; aiokafka retries if the error is retriable."""
    # With a top-level error, the response contains no partitions.
    if answer.error_code:
        refusal: KafkaError = for_code(answer.error_code)()
        return refusal
    if answer.API_VERSION == _STABLE_VERSION and any(
        code == UNSTABLE_OFFSET_COMMIT
        for _, partitions, _ in answer.topics
        for *_, code, _ in partitions
    ):
        return _PendingOffsetError("a transaction is about to move the offset")
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
"""The topic id in requests by name, and in responses for topics that have no id."""


class FetchedTopic(NamedTuple):
    """A topic as the brokers' metadata describes it."""

    topic_id: str | None
    """The topic's id, in the form that `kafka-topics.sh --describe` shows; `None` if it has
    none."""
    partitions: int
    """Its number of partitions."""


class Uuid(AbstractType[bytes]):  # type: ignore[misc]  # aiokafka is untyped
    """The sixteen bytes of a topic id."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        """Return the bytes unchanged."""
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        """Return the next sixteen bytes."""
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


class _TopicMetadata(Request[_MetadataRequest]):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = 3

    def __init__(self, topics: Sequence[str], *, with_rights: bool = False) -> None:
        self._topics = topics
        self._with_rights = with_rights

    def build(self, request_struct_class: type[Any]) -> Any:  # noqa: ANN401  # aiokafka is untyped
        tags: dict[int, bytes] = {}
        wanted = [(_NOTHING, topic, tags) for topic in self._topics]
        make_topics = with_cluster_rights = False
        return request_struct_class(
            wanted, make_topics, with_cluster_rights, self._with_rights, tags
        )


def connected_node(client: AIOKafkaClient) -> Any | None:  # noqa: ANN401  # aiokafka is untyped
    """Return a broker to which a connection for general requests is open, or `None`.

    Remove once `get_random_node` prefers such brokers.
    """
    connected = (
        node
        for (node, group), connection in client._conns.items()
        if group is ConnectionGroup.DEFAULT and connection.connected()
    )
    return next(connected, None)


async def fetch_topic_ids(
    client: AIOKafkaClient,
    topics: Sequence[str],
    *,
    node: Any | None = None,  # noqa: ANN401  # aiokafka is untyped
) -> dict[str, str | None] | None:
    """Return the id of each existing topic; `None` if the brokers do not report ids.

    The request goes to `node`, by default to any broker.
    """
    found = await fetch_topics(client, topics, node=node)
    return None if found is None else {topic: each.topic_id for topic, each in found.items()}


async def fetch_topics(
    client: AIOKafkaClient,
    topics: Sequence[str],
    *,
    node: Any | None = None,  # noqa: ANN401  # aiokafka is untyped
) -> dict[str, FetchedTopic] | None:
    """Return the id and the number of partitions of each existing topic.

    Returns `None` if the brokers are older than Kafka 2.8 and do not report ids. Raises aiokafka's
    errors. Remove once aiokafka supports version 10 of Metadata.
    """
    # Any broker will do; if its metadata is out of date, the next check requests it again.
    node = client.get_random_node() if node is None else node
    if node is None:
        raise KafkaConnectionError("no broker is known")
    try:
        answer = await client.send(node, _TopicMetadata(topics))
    except NotImplementedError:  # aiokafka raises it if the broker does not support the version
        return None
    return {
        name: FetchedTopic(
            None
            if identity == _NOTHING
            else base64.urlsafe_b64encode(identity).decode().rstrip("="),
            len(partitions),
        )
        for error_code, name, identity, _, partitions, *_ in answer.topics
        if error_code != UnknownTopicOrPartitionError.errno and identity is not None
    }


OPERATIONS: Final = {
    3: "Read",
    4: "Write",
    5: "Create",
    6: "Delete",
    7: "Alter",
    8: "Describe",
    10: "DescribeConfigs",
    11: "AlterConfigs",
}
"""Kafka's names of the operations on topics, by their bits in responses."""


async def fetch_operations(
    admin: AIOKafkaAdminClient, topics: Sequence[str]
) -> dict[str, frozenset[str]] | None:
    """Return, for each topic, the operations that this user may perform.

    Topics that do not exist are left out. A topic that the user may not describe has no operations.
    Returns `None` if the brokers are older than Kafka 2.8. Raises aiokafka's errors. Remove once
    aiokafka supports version 10 of Metadata.
    """
    client = admin._client
    node = client.get_random_node()
    if node is None:
        raise KafkaConnectionError("no broker is known")
    try:
        answer = await client.send(node, _TopicMetadata(topics, with_rights=True))
    except NotImplementedError:  # as above
        return None
    found: dict[str, frozenset[str]] = {}
    for error_code, name, _, _, _, bits, _ in answer.topics:
        if error_code == TopicAuthorizationFailedError.errno:
            found[name] = frozenset()
        elif error_code != UnknownTopicOrPartitionError.errno:
            found[name] = frozenset(word for bit, word in OPERATIONS.items() if bits >> bit & 1)
    return found
