"""Inspects an installation on the brokers without changing it: topics, permissions, groups.

`gpuledger doctor` judges the results. The permissions are those of the connected user, which each
user may query. Listing the ACLs of other users would require a permission on the cluster.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiokafka.errors import (
    GroupAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    for_code,
)

from gpuledger.bus.administration import KafkaAdmin, TopicLine, compare_topics, open_admin
from gpuledger.bus.aiokafka_patches.markers import fetch_marker_times
from gpuledger.bus.aiokafka_patches.requests import fetch_operations
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.protocol import TopicPartition
from gpuledger.settings import KafkaSettings

_COORDINATORS: Final = {"group": 0, "transactionalId": 1}
"""Kafka's types of coordinators, by the type of the resource that they coordinate."""
_DEAD: Final = "Dead"
"""Kafka's state of a group that has neither members nor commits."""


@dataclass(frozen=True, kw_only=True)
class FoundGroup:
    """A consumer group as its coordinator describes it."""

    members: int
    """Number of members; 0 if no component is running."""
    committed: Mapping[TopicPartition, int]
    """Committed offsets; empty if the group has never committed, or its commits have expired."""


class Inspector:
    """Sends requests about the installation over one connection."""

    def __init__(self, settings: KafkaSettings, admin: KafkaAdmin) -> None:
        self._settings = settings
        self._admin = admin

    async def count_brokers(self) -> int:
        """Return the number of available brokers."""
        return await self._admin.count_brokers()

    async def compare_topics(self) -> list[TopicLine]:
        """Compare each topic with the topic table; raises `RefusedError`."""
        return await compare_topics(self._admin, self._settings)

    async def list_operations(self, topics: Sequence[str]) -> Mapping[str, Collection[str]] | None:
        """Return the operations that this user may perform on each existing topic.

        Returns `None` if the brokers do not report them.
        """
        return await self._admin.repeated(
            "looking up permissions", lambda: fetch_operations(self._admin.client, topics)
        )

    async def may_use(self, resource: str, name: str) -> bool:
        """Return whether this user has any permission on a `group` or a `transactionalId`.

        The brokers look up a coordinator only for users with `Describe`, which `Read` and `Write`
        imply.
        """

        async def is_found() -> bool:
            try:
                await self._admin.client.find_coordinator(name, _COORDINATORS[resource])
            except (GroupAuthorizationFailedError, TransactionalIdAuthorizationFailed):
                return False
            return True

        return await self._admin.repeated(f"looking up the coordinator of {name}", is_found)

    async def describe_group(self, name: str) -> FoundGroup | None:
        """Return a consumer group; `None` if it does not exist. Raises `RefusedError`."""
        client = self._admin.client

        async def describe() -> tuple[str, int]:
            # One group per request: aiokafka reads only the first group of a response correctly.
            (answer,) = await client.describe_consumer_groups([name])
            error_code, _, state, _, _, members, *_ = answer.groups[0]
            if error_code:
                raise for_code(error_code)(name)
            return state, len(members)

        state, members = await self._admin.repeated(f"describing the group {name}", describe)
        commits = await self._admin.repeated(
            f"reading the commits of the group {name}",
            lambda: client.list_consumer_group_offsets(name),
        )
        if state == _DEAD and not commits:
            return None
        committed = {TopicPartition(*at): each.offset for at, each in commits.items()}
        return FoundGroup(members=members, committed=committed)

    async def read_marker_times_ms(self, topic: str, ends: Mapping[int, int]) -> list[int]:
        """Return the time of each partition's last transaction marker, by its broker's clock.

        `ends` has the last stable offset by partition, without empty partitions. All records of
        the topic must be written in transactions. Partitions whose last record is not a marker are
        left out.
        """
        return await self._admin.repeated(
            "reading transaction markers",
            lambda: fetch_marker_times(self._admin.client, topic, ends),
        )


@asynccontextmanager
async def open_inspector(settings: KafkaSettings) -> AsyncIterator[Inspector]:
    """Open an inspector; raise `BusUnavailableError` if no broker answers."""
    async with open_admin(KafkaConnection(settings)) as admin:
        yield Inspector(settings, admin)
