"""Asks a group's coordinator what is committed, and takes no refusal for an answer.

aiokafka 0.14 speaks OffsetFetch up to version 3, and takes two answers for more than they are:

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
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Final, TypeAlias

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
    for_code,
)
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
_wants_stable: Final = ContextVar("wants_stable", default=False)
"""How `stable_offsets` reaches the request, which aiokafka makes in the same task."""

# ruff: noqa: SLF001  # aiokafka has no public name for what is replaced here


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
        topics = [(topic, each, tags) for topic, each in self._partitions]
        require_stable = True
        return _StableRequest(self._group, topics, require_stable, tags)


async def committed_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, str]]:
    """Return the committed offsets with their metadata, which `committed` leaves out."""
    found: dict[Any, tuple[int, str]] = await client._coordinator.fetch_committed_offsets(
        list(partitions)
    )
    return found


async def stable_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, str]]:
    """Return the same as soon as nothing that is under way will move them."""
    asking = _wants_stable.set(True)
    try:
        return await committed_offsets(client, partitions)
    finally:
        _wants_stable.reset(asking)


def heed_refused_offsets(client: AIOKafkaConsumer) -> None:
    """Have the consumer ask again where the coordinator refuses to say what is committed."""
    coordinator = client._coordinator

    def look_for_another(error: KafkaError) -> None:
        if isinstance(error, _COORDINATOR_LEFT):
            coordinator.coordinator_dead()

    coordinator._send_req = _heeding(coordinator._send_req, on_refusal=look_for_another)


def heed_refused_group_offsets(client: AIOKafkaAdminClient) -> None:
    """Have the administration client raise where a coordinator refuses a group's offsets."""
    client._send_request = _heeding(client._send_request, on_refusal=lambda _: None)


def _heeding(send: _Send, *, on_refusal: Callable[[KafkaError], None]) -> _Send:
    """Return a way to send requests that looks at the answers on a group's offsets."""

    async def send_and_look(request: Any, *arguments: Any) -> Any:  # noqa: ANN401  # aiokafka is untyped
        if not isinstance(request, OffsetFetchRequest):
            return await send(request, *arguments)
        if _wants_stable.get():
            request = _StableOffsets(request._consumer_group, request._partitions)
        answer = await send(request, *arguments)
        if (error := _refusal_of(answer)) is not None:
            on_refusal(error)
            raise error
        return _as_aiokafka_reads_it(answer)

    return send_and_look


def _refusal_of(answer: Any) -> KafkaError | None:  # noqa: ANN401  # aiokafka is untyped
    """Return why this is no answer; aiokafka asks again where the error is retriable."""
    if answer.error_code:
        refusal: KafkaError = for_code(answer.error_code)()
        return refusal
    if answer.API_VERSION == _STABLE_VERSION and UNSTABLE_OFFSET_COMMIT in _codes(answer):
        # A code that aiokafka does not know, in the place of one after which it asks again.
        return GroupLoadInProgressError("a transaction is about to move the offset")
    return None


def _codes(answer: Any) -> set[int]:  # noqa: ANN401  # aiokafka is untyped
    return {code for _, partitions, _ in answer.topics for *_, code, _ in partitions}


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
