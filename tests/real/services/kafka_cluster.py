"""Three Kafka brokers that replicate everything; each can be killed and restarted separately."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.real.services.kafka import Kafka, KafkaDistribution, count_brokers
from tests.real.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BROKERS = 3
REPLICATED = {
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "min.insync.replicas": "2",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "replica.lag.time.max.ms": "5000",
}


class Member(Kafka):
    """One broker of a cluster."""

    def __init__(
        self,
        *,
        distribution: KafkaDistribution,
        folder: Path,
        node_id: int,
        controller_ports: Sequence[int],
    ) -> None:
        super().__init__(distribution=distribution, folder=folder)
        self.node_id = node_id
        self.controller_port = controller_ports[node_id - 1]
        self._voters = ",".join(
            f"{node}@127.0.0.1:{port}" for node, port in enumerate(controller_ports, start=1)
        )

    @override
    def listeners(self) -> dict[str, str]:
        # In a properties file the last value counts.
        return {**super().listeners(), **REPLICATED, "node.id": str(self.node_id)}

    @override
    def voters(self) -> str:
        return self._voters

    @override
    def format_arguments(self) -> list[str]:
        # The template has another node's id: each broker formats its own folder.
        return ["--ignore-formatted"]

    @override
    def is_ready(self) -> bool:
        return count_brokers("127.0.0.1", self.port) >= BROKERS


class KafkaCluster:
    """Three brokers; `bootstrap_servers` names all of them."""

    def __init__(self, *, distribution: KafkaDistribution, folder: Path) -> None:
        ports = free_ports(BROKERS)
        self.brokers = [
            Member(
                distribution=distribution,
                folder=folder / f"broker-{node}",
                node_id=node,
                controller_ports=ports,
            )
            for node in range(1, BROKERS + 1)
        ]
        self.bootstrap_servers = ",".join(broker.bootstrap_servers for broker in self.brokers)

    def start(self) -> None:
        """Start all at once, and wait until each knows the others."""
        with ThreadPoolExecutor(BROKERS) as pool:
            list(pool.map(Member.start, self.brokers))

    def discard(self) -> None:
        """End all and delete their data."""
        for broker in self.brokers:
            broker.discard()
