"""Committed offsets are requested such that the answer is final, and an error is not an answer."""
# ruff: noqa: SLF001  # aiokafka's own names, which are replaced

from collections.abc import Sequence
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Final

import pytest
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
)
from aiokafka.protocol.commit import OffsetFetchRequest, OffsetFetchResponse_v3
from aiokafka.structs import TopicPartition

from gpuledger.bus.aiokafka_patches.requests import (
    UNSTABLE_OFFSET_COMMIT,
    committed_offsets,
    heed_refused_offsets,
    stable_offsets,
)

KEY: Final = OffsetFetchResponse_v3.API_KEY
SINCE_2_5: Final = {KEY: (1, 9)}
BEFORE_2_5: Final = {KEY: (0, 6)}
Partitions = Sequence[tuple[int, int, str | None, int]]
"""Partition number, offset, metadata and error code of each."""


class Coordinator:
    """A group's coordinator behind a client: it reads requests as bytes and returns bytes."""

    def __init__(
        self,
        partitions: Partitions = (),
        *,
        error_code: int = 0,
        versions: dict[int, tuple[int, int]] = SINCE_2_5,
    ) -> None:
        self.requests: list[Any] = []
        self.is_left = False
        self._partitions, self._error_code = partitions, error_code
        self._versions = versions

    async def _send_req(self, request: Any) -> Any:  # noqa: ANN401  # aiokafka is untyped
        sent = request.prepare(self._versions)
        read = type(sent).decode(BytesIO(sent.encode()))
        self.requests.append(read)
        answer = read.RESPONSE_TYPE(*self._answer(read.API_VERSION))
        return read.RESPONSE_TYPE.decode(BytesIO(answer.encode()))

    async def fetch_committed_offsets(self, partitions: Sequence[TopicPartition]) -> object:
        numbers = [partition.partition for partition in partitions]
        answer = await self._send_req(OffsetFetchRequest("rows", [("events", numbers)]))
        return answer.topics

    def coordinator_dead(self) -> None:
        self.is_left = True

    def _answer(self, version: int) -> Sequence[Any]:
        epoch, throttle_time_ms = 5, 0
        tags: dict[int, bytes] = {}
        if version <= 3:
            topics: list[Any] = [("events", list(self._partitions))]
            return throttle_time_ms, topics, self._error_code
        each = [
            (number, offset, epoch, metadata, code, tags)
            for number, offset, metadata, code in self._partitions
        ]
        return throttle_time_ms, [("events", each, tags)], self._error_code, tags


def client_of(coordinator: Coordinator) -> Any:  # noqa: ANN401  # aiokafka is untyped
    client = SimpleNamespace(_coordinator=coordinator)
    heed_refused_offsets(client)
    return client


PARTITIONS: Final = [TopicPartition("events", 0), TopicPartition("events", 1)]


def ignore() -> None:
    """Take note of nothing."""


LOOKUPS: Final[Sequence[Any]] = [committed_offsets, partial(stable_offsets, on_pending=ignore)]


async def test_stable_offsets_are_requested_and_returned_as_aiokafka_reads_them() -> None:
    coordinator = Coordinator([(0, 17, "topic_id=a", 0), (1, -1, None, 0)])
    found: Any = await stable_offsets(client_of(coordinator), PARTITIONS, on_pending=ignore)
    (requested,) = coordinator.requests
    assert requested.require_stable is True
    assert requested.consumer_group == "rows"
    assert requested.topics == [("events", [0, 1], {})]
    assert found == [("events", [(0, 17, "topic_id=a", 0), (1, -1, "", 0)])]


@pytest.mark.parametrize(
    ("look_up", "versions"), list(zip(LOOKUPS, [SINCE_2_5, BEFORE_2_5], strict=True))
)
async def test_latest_offsets_and_brokers_without_stable_offsets_get_the_request_of_aiokafka(
    look_up: Any,  # noqa: ANN401  # one of the two
    versions: dict[int, tuple[int, int]],
) -> None:
    coordinator = Coordinator([(0, 17, "m", 0)], versions=versions)
    found = await look_up(client_of(coordinator), PARTITIONS)
    (requested,) = coordinator.requests
    assert requested.API_VERSION == 3
    assert found == [("events", [(0, 17, "m", 0)])]


@pytest.mark.parametrize("look_up", LOOKUPS)
@pytest.mark.parametrize(
    ("error", "is_left"),
    [
        (GroupLoadInProgressError, False),
        (NotCoordinatorForGroupError, True),
        (GroupCoordinatorNotAvailableError, True),
        (GroupAuthorizationFailedError, False),
    ],
)
async def test_an_error_is_raised_and_a_coordinator_that_left_is_looked_up_again(
    look_up: Any,  # noqa: ANN401  # one of the two
    error: type[KafkaError],
    *,
    is_left: bool,
) -> None:
    """An error response names no partitions, so it could be mistaken for "nothing is committed"."""
    coordinator = Coordinator(error_code=error.errno)
    with pytest.raises(error):
        await look_up(client_of(coordinator), PARTITIONS)
    assert coordinator.is_left is is_left


async def test_an_offset_that_a_transaction_is_about_to_change_is_requested_again() -> None:
    """aiokafka retries after this error."""
    coordinator = Coordinator([(0, 17, "", 0), (1, -1, "", UNSTABLE_OFFSET_COMMIT)])
    pending: list[None] = []
    with pytest.raises(KafkaError) as raised:
        await stable_offsets(
            client_of(coordinator), PARTITIONS, on_pending=lambda: pending.append(None)
        )
    assert raised.value.retriable
    assert pending
    assert not coordinator.is_left


async def test_latest_offsets_can_be_requested_after_stable_offsets() -> None:
    coordinator = Coordinator([(0, 17, "", 0)])
    client = client_of(coordinator)
    await stable_offsets(client, PARTITIONS, on_pending=ignore)
    await committed_offsets(client, PARTITIONS)
    assert [requested.API_VERSION for requested in coordinator.requests] == [7, 3]


async def test_other_requests_are_sent_unchanged() -> None:
    sent: list[object] = []

    async def send(request: object) -> str:
        sent.append(request)
        return "answered"

    coordinator = SimpleNamespace(_send_req=send)
    heed_refused_offsets(SimpleNamespace(_coordinator=coordinator))
    request = object()
    assert await coordinator._send_req(request) == "answered"
    assert sent == [request]
