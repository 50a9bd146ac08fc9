"""The numbers of partitions, as the brokers return them."""

from types import SimpleNamespace

from gpuledger.bus.kafka_connection import count_partitions


class StartingCluster:
    """A client of a cluster whose first broker appears only in the second metadata response."""

    def __init__(self) -> None:
        self.cluster = self
        self._questions = 0

    def brokers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(nodeId=1)] if self._questions >= 2 else []

    async def force_metadata_update(self) -> None:
        self._questions += 1

    async def send(self, node: int, _: object) -> SimpleNamespace:
        return SimpleNamespace(topics=[(0, "pods", False, [node, node])])


async def test_partitions_are_counted_as_soon_as_a_starting_broker_is_known() -> None:
    assert await count_partitions(StartingCluster(), ["pods"], servers="kafka:9092") == {"pods": 2}
