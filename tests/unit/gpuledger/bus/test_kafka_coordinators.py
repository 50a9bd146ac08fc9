"""Coordinators are found, and left, even if a broker neither answers nor closes connections."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    KafkaError,
    NodeNotReadyError,
    RequestTimedOutError,
)
from aiokafka.protocol.commit import OffsetFetchRequest

from gpuledger.bus.aiokafka_patches.coordinators import look_up_at_each_broker
from gpuledger.bus.aiokafka_patches.requests import committed_offsets, heed_refused_offsets

HANGS, AWAY, LOADING, KNOWS = "hangs", "is away", "has no coordinator", "knows the coordinator"
COORDINATOR = 7


class Brokers:
    """A client of brokers, each of which reacts differently; node 0 is the first."""

    coordinator_lookup: Any

    def __init__(self, *reactions: str) -> None:
        self._reactions = reactions
        self.cluster = self

    def brokers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(nodeId=node) for node in range(len(self._reactions))]

    async def send(self, node: int, request: object) -> SimpleNamespace:  # the client's method
        reaction = self._reactions[node]
        if reaction == HANGS:
            await asyncio.Event().wait()
        if reaction == AWAY:
            raise NodeNotReadyError
        code = GroupCoordinatorNotAvailableError.errno if reaction == LOADING else 0
        return SimpleNamespace(error_code=code, coordinator_id=COORDINATOR)


async def look_up(*reactions: str) -> object:
    client = Brokers(*reactions)
    look_up_at_each_broker(client, seconds=0.01)
    return await client.coordinator_lookup(CoordinationType.GROUP, "join")


@pytest.mark.parametrize("others", [[HANGS, HANGS], [AWAY, HANGS], [LOADING, AWAY], []])
async def test_a_coordinator_is_found_if_any_broker_knows_it(others: list[str]) -> None:
    assert await look_up(*others, KNOWS) == COORDINATOR


@pytest.mark.parametrize(
    ("reactions", "error"),
    [
        ([HANGS, HANGS], RequestTimedOutError),
        ([AWAY], NodeNotReadyError),
        ([LOADING], GroupCoordinatorNotAvailableError),
        ([], KafkaError),
    ],
)
async def test_otherwise_the_error_makes_the_client_ask_again(
    reactions: list[str], error: type[KafkaError]
) -> None:
    with pytest.raises(error) as raised:
        await look_up(*reactions)
    assert raised.value.retriable


class HangingCoordinator:
    """A group's coordinator that does not answer, and its client."""

    def __init__(self) -> None:
        self.coordinator_id: int | None = COORDINATOR
        self.closed: list[str] = []
        self._conns = {
            (COORDINATOR, group): SimpleNamespace(close=lambda reason, to=group: self._note(to))
            for group in (ConnectionGroup.COORDINATION, ConnectionGroup.DEFAULT)
        }
        self._client = self._coordinator = self

    def _note(self, group: ConnectionGroup) -> None:
        self.closed.append(group)

    async def _send_req(self, _: object) -> None:
        await asyncio.Event().wait()

    async def fetch_committed_offsets(self, _: object) -> None:
        await self._send_req(OffsetFetchRequest("join", []))

    def coordinator_dead(self) -> None:
        self.coordinator_id = None


async def test_a_coordinator_that_does_not_answer_is_left_with_its_connection() -> None:
    client: Any = HangingCoordinator()
    heed_refused_offsets(client, answer_seconds=0.01)
    with pytest.raises(RequestTimedOutError):
        await committed_offsets(client, [])
    assert client.coordinator_id is None
    assert client.closed == [ConnectionGroup.COORDINATION]
