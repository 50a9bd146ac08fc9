"""Permissions, groups and clocks, as brokers of any version return them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    KafkaConnectionError,
    TransactionalIdAuthorizationFailed,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from gpuledger.bus.administration import KafkaAdmin
from gpuledger.bus.aiokafka_patches.markers import fetch_marker_times
from gpuledger.bus.aiokafka_patches.requests import fetch_operations
from gpuledger.bus.inspection import FoundGroup, Inspector
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.protocol import TopicPartition
from gpuledger.settings import KafkaSettings

NO_ERROR, UNKNOWN_TOPIC, HIDDEN = 0, 3, 29
READ, WRITE, DESCRIBE = 1 << 3, 1 << 4, 1 << 8
SETTINGS = KafkaSettings()
MARKER_BIT = 1 << 5


class Client:
    """aiokafka's client, which returns one response."""

    def __init__(self, answer: Any, *, node: int | None = 1) -> None:  # noqa: ANN401  # aiokafka is untyped
        self._answer, self._node = answer, node
        self.cluster = SimpleNamespace(leader_for_partition=lambda _: node)

    def get_random_node(self) -> int | None:
        return self._node

    def add_topic(self, topic: str) -> None:
        pass

    async def force_metadata_update(self) -> None:
        pass

    async def send(self, node: int, request: object) -> object:
        if isinstance(self._answer, Exception):
            raise self._answer
        return SimpleNamespace(topics=self._answer)


def admin_of(client: Client) -> Any:  # noqa: ANN401  # as above
    return SimpleNamespace(_client=client)


def topic(code: int, name: str, bits: int) -> tuple[object, ...]:
    return (code, name, bytes(16), False, [], bits, {})


async def test_the_operations_on_a_topic_are_the_bits_of_the_response() -> None:
    found = await fetch_operations(
        admin_of(
            Client(
                [
                    topic(NO_ERROR, "mine", READ | WRITE | DESCRIBE),
                    topic(NO_ERROR, "read", READ | DESCRIBE),
                    topic(HIDDEN, "hidden", -(2**31)),
                    topic(UNKNOWN_TOPIC, "gone", -(2**31)),
                ]
            )
        ),
        ["mine", "read", "hidden", "gone"],
    )
    assert found == {
        "mine": {"Read", "Write", "Describe"},
        "read": {"Read", "Describe"},
        "hidden": frozenset(),
    }


async def test_brokers_that_do_not_report_operations_return_none() -> None:
    old = Client(NotImplementedError("Support for _TopicMetadata v5 has not yet been added"))
    assert await fetch_operations(admin_of(old), ["mine"]) is None
    with pytest.raises(KafkaConnectionError):
        await fetch_operations(admin_of(Client([], node=None)), ["mine"])


class AdminClient:
    """aiokafka's administration client, with a group that is first being loaded."""

    def __init__(self, *, state: str, members: int, commits: dict[TopicPartition, int]) -> None:
        self._state, self._members, self._commits = state, members, commits
        self._codes = [GroupCoordinatorNotAvailableError.errno, NO_ERROR]

    async def describe_consumer_groups(self, names: list[str]) -> list[object]:
        members = ["member"] * self._members
        code = self._codes.pop(0)
        group = (code, names[0], self._state, "consumer", "range", members)
        return [SimpleNamespace(groups=[group])]

    async def list_consumer_group_offsets(self, name: str) -> dict[object, object]:
        return {at: SimpleNamespace(offset=offset) for at, offset in self._commits.items()}

    async def find_coordinator(self, name: str, kind: int) -> int:
        refusals = (GroupAuthorizationFailedError, TransactionalIdAuthorizationFailed)
        if name == "refused":
            raise refusals[kind]
        return 1


def inspector(**changes: Any) -> Inspector:  # noqa: ANN401  # the client's own values
    values: dict[str, Any] = {"state": "Stable", "members": 2, "commits": {}} | changes
    client: Any = AdminClient(**values)
    return Inspector(SETTINGS, KafkaAdmin(connection=KafkaConnection(SETTINGS), client=client))


async def test_a_group_has_its_members_and_offsets_once_its_coordinator_is_known() -> None:
    at = TopicPartition("events", 3)
    found = await inspector(commits={at: 7}).describe_group("join")
    assert found == FoundGroup(members=2, committed={at: 7})


@pytest.mark.parametrize(
    ("state", "commits", "exists"),
    [("Dead", {}, False), ("Empty", {}, True), ("Dead", {TopicPartition("events", 0): 1}, True)],
)
async def test_a_dead_group_without_commits_does_not_exist(
    state: str, commits: dict[TopicPartition, int], *, exists: bool
) -> None:
    found = await inspector(state=state, members=0, commits=commits).describe_group("join")
    assert (found is not None) == exists


@pytest.mark.parametrize("resource", ["group", "transactionalId"])
async def test_a_user_may_use_what_its_coordinator_may_be_looked_up_for(resource: str) -> None:
    assert await inspector().may_use(resource, "mine")
    assert not await inspector().may_use(resource, "refused")


def batch(*, time_ms: int, offset: int, is_marker: bool) -> bytes:
    """Return a batch of one record; the bit of a marker is set without a new checksum."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=1,
        producer_id=1,
        producer_epoch=0,
        base_sequence=0,
        batch_size=1000,
    )
    builder.append(0, timestamp=time_ms, key=b"k", value=b"v", headers=[])
    written = bytearray(builder.build())
    written[:8] = offset.to_bytes(8, "big")
    if is_marker:
        written[22] |= MARKER_BIT
    return bytes(written)


async def test_only_the_last_marker_of_a_partition_has_the_brokers_time() -> None:
    batches = (
        batch(time_ms=1, offset=5, is_marker=True)
        + batch(time_ms=2, offset=6, is_marker=False)
        + batch(time_ms=3, offset=7, is_marker=True)
    )
    client = Client([("events", [(0, NO_ERROR, 8, 8, None, batches)])])
    assert await fetch_marker_times(admin_of(client), "events", {0: 8}) == [3]
    data = Client(
        [("events", [(0, NO_ERROR, 7, 7, None, batch(time_ms=2, offset=6, is_marker=False))])]
    )
    assert await fetch_marker_times(admin_of(data), "events", {0: 7}) == []
    with pytest.raises(KafkaConnectionError):
        await fetch_marker_times(admin_of(Client([], node=None)), "events", {0: 7})
